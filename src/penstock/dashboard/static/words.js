/* What the words of a run mean: states, deciders, kinds of spans. */

const STATES = { running: "calm", ready: "good", completed: "good", failed: "bad", fatal: "bad", dead: "bad", crashed: "bad", killed: "bad", starting: "calm", pending: "calm", attached: "good", stopping: "warn", suspended: "warn", degraded: "warn", backoff: "warn", lost: "bad" };

/** States in which a run stays until a user acts. */
export const OVER = new Set(["completed", "stopped", "failed", "lost", "unknown", "unreadable"]);

/** Return the style of a state of a run or a process. */
export function stateClass(state) {
  return STATES[state] ?? "";
}

/** Return what a phase before the first step is for, as a sentence; empty for another phase. */
export function phaseAbout(phase) {
  const found = PHASES.find(([begin]) => phase.startsWith(begin));
  return found ? found[1] : "";
}

const PHASES = [
  ["pending", "The supervisor is about to start the processes."],
  ["starting", "Processes start, load the model and find each other."],
  ["warm start", "The trainer imitates demonstrations, so that the policy finds some rewards. Training by reward comes after it."],
  ["evaluating the untrained policy", "Held-out tasks are played, so that later evaluations have something to compare with."],
  ["waiting for the first step", "Episodes are played. The first step begins when enough groups are ready."],
  ["waiting for", "Without it the run cannot go on."],
];

/** Decider -> what it decides, in one sentence. */
export const DECIDERS = {
  admission: "takes tasks into the queue before there is room for them, so that dispatch can choose.",
  dispatch: "chooses which group starts next, and on which worker.",
  segment: "says what happens to answers that reached the end of their segment.",
  filter: "keeps or drops a whole group, when all its answers have a reward.",
  staleness: "drops answers that are too old to train.",
  trigger: "says when the learner starts: enough samples are ready, or it has waited long enough.",
  feedback: "looks at the policy's entropy and says how the trigger's thresholds should move.",
  adaptation: "moves the trigger's thresholds.",
  tuning: "searches for better settings, tries them, and keeps them or takes them back.",
  evaluation: "follows the held-out tasks.",
  retry: "starts a failed group again, or gives it up.",
  restart: "starts answers again that were too long for their round.",
  lost: "takes back the groups of a worker that is gone.",
  "early stop": "ends training when nothing more is learnt.",
};

/** Kind of span -> [name, style, height of its bar as a share of the lane]. The order is that of drawing. */
export const KINDS = {
  generate: ["generation", "k-generate", 0.74],
  warm_start: ["warm start", "k-warm", 0.74],
  evaluate: ["evaluation", "k-evaluate", 0.74],
  train: ["forward and backward", "k-train", 0.74],
  step: ["optimizer step", "k-step", 0.74],
  publish: ["publish weights", "k-publish", 0.74],
  update_weights: ["update weights", "k-update", 0.94],
  checkpoint: ["checkpoint", "k-checkpoint", 0.74],
  restore: ["restore", "k-checkpoint", 0.5],
};

export const kindOf = (kind) => KINDS[kind] ?? [kind.replaceAll("_", " "), "k-other", 0.6];

/** Kinds of spans that compute with the model, which count as busy. */
export const WORK = new Set(["generate", "train", "step", "warm_start", "evaluate"]);

/** State of an episode -> [what it means, style of the flow, whether it is final, what it meant then]. */
export const LEDGER = {
  pending: ["waits to start", "flow-live", false, "waited to start"],
  leased: ["is being played", "flow-live", false, "was being played"],
  unfinished: ["waits between two segments", "flow-live", false, "waited between two segments"],
  rewarding: ["waits for its reward", "flow-live", false, "waited for its reward"],
  ready: ["waits for the learner", "flow-live", false, "waited for the learner"],
  training: ["is in the learner", "flow-live", false, "was in the learner"],
  trained: ["the learner has used it", "flow-trained", true],
  collected: ["written to the dump", "flow-collected", true],
  filtered: ["its group taught nothing and was dropped by a filter", "flow-filtered", true],
  discarded_stale: ["too old when its turn came", "flow-stale", true],
  discarded_surplus: ["an extra member that was not needed", "flow-surplus", true],
  failed: ["its group failed for good", "flow-failed", true],
  cancelled: ["ended with the run", "flow-cancelled", true],
};
