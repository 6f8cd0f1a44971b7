"""A rollout server that says words by chance, and follows the protocol of weights. What it served is written down."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from injection import Injector, Phase, faulty

from penstock.config import load_config
from penstock.model.chat import ChatTokenizer
from penstock.observe import jsonl
from penstock.processes import bus_client
from penstock.processes.layout import model_dir
from penstock.rollout import bodies
from penstock.supervisor.child import Child
from penstock.types import NO_VERSION, WeightsHandle
from roles.ending import watch_the_end

ANSWER_S = 0.02
WORD_LENGTH = 4


class Server(bus_client.Member):
    """Serves the weights of the stand-in trainer, whose content is only compared."""

    def __init__(self, child: Child, chat: ChatTokenizer, injector: Injector) -> None:
        self._child, self._injector = child, injector
        self._letters, self._eos = chat.encode("abcdefgh"), chat.eos_ids[0]
        self._staged: WeightsHandle | None = None
        self._version = NO_VERSION
        self._num_answers = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.post("/generate", self.generate),
                web.post("/weights/begin", self.begin),
                web.post("/weights/commit", self.commit),
                web.post("/weights/abort", self.abort),
            ]
        )
        return app

    async def health(self, _: web.Request) -> web.Response:
        return answer({})

    async def ready(self, _: web.Request) -> web.Response:
        self._check_serving()
        identity = {"run_id": self._child.run_id, "nonce": self._child.secret("identity")}
        return answer(bodies.Ready(**identity, policy_version=self._version, state="serving"))

    async def generate(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._injector.moment, Phase.RUNNING, nth=3)
        self._check_serving()
        params = bodies.decode(await request.read(), bodies.GenerateBody).sampling_params
        assert isinstance(params, bodies.SamplingBody) and isinstance(params.sampling_seed, list)
        replies = [self._say(random.Random(seed)) for seed in params.sampling_seed]
        await asyncio.sleep(ANSWER_S)
        self._num_answers += len(replies)
        return answer(replies if params.n > 1 else replies[0])

    def _say(self, rng: random.Random) -> bodies.GenerateReply:
        tokens = [*rng.choices(self._letters, k=WORD_LENGTH), self._eos]
        meta = bodies.MetaInfo(
            id="",
            finish_reason=bodies.Stop(matched=self._eos),
            prompt_tokens=0,
            completion_tokens=len(tokens),
            weight_version=str(self._version),
            weight_versions=[bodies.WeightSpan(version=str(self._version), start=0, end=len(tokens))],
            e2e_latency=ANSWER_S,
            output_token_logprobs=[(-1.0, token, None) for token in tokens],
        )
        return bodies.GenerateReply(text="", output_ids=tokens, meta_info=meta)

    async def begin(self, request: web.Request) -> web.Response:
        handle = bodies.decode(await request.read(), WeightsHandle)
        published = msgspec.json.decode(await asyncio.to_thread(Path(handle.path).read_bytes))
        assert published["policy_version"] == handle.policy_version
        self._staged = handle
        return answer(reply_to(handle, "staged"))

    async def commit(self, request: web.Request) -> web.Response:
        handle = self._staged
        asked = bodies.decode(await request.read(), bodies.CommitBody).policy_version
        if handle is None or handle.policy_version != asked:
            raise web.HTTPConflict(text="nothing is staged")
        if handle.policy_version > 0:
            await asyncio.to_thread(self._injector.moment, Phase.PUBLISHING)
        self._version = handle.policy_version
        served = {"server": self._child.name, "policy_version": self._version, "fingerprint": handle.fingerprint}
        jsonl.append(self._child.run_dir / "served.jsonl", served)
        return answer(reply_to(handle, "committed"))

    async def abort(self, _: web.Request) -> web.Response:
        self._staged = None
        return answer({})

    def _check_serving(self) -> None:
        if self._version == NO_VERSION:
            raise web.HTTPServiceUnavailable(text="no weights yet")

    def telemetry(self) -> bus_client.Telemetry:
        return bus_client.Telemetry(progress=self._num_answers)


def reply_to(handle: WeightsHandle, state: str) -> bodies.WeightsReply:
    return bodies.WeightsReply(
        state=state, policy_version=handle.policy_version, fingerprint=handle.fingerprint, transport="file"
    )


def answer(value: Any) -> web.Response:
    return web.Response(body=bodies.encode(value), content_type="application/json")


async def serve(child: Child, injector: Injector) -> None:
    stop = child.stop_event()
    config = load_config(child.run_dir / "config.yaml")
    server = Server(child, ChatTokenizer.load(model_dir(config, child.run_dir)), injector)
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
    url = "http://{}:{}".format(*runner.addresses[0])
    try:
        async with bus_client.membership(child, config, role="rollout", member=server, url=url):
            child.report_ready(url)
            await stop.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    child, injector = Child.from_environment(), Injector.of_this_process()
    injector.moment(Phase.STARTING)
    watch_the_end(injector)
    bus_client.Peer = faulty(bus_client.Peer, injector)  # type: ignore[misc, assignment]
    child.run(lambda: serve(child, injector))
