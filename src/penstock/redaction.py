"""Find secrets in settings and in text, and hide them (standard library only: every process logs).

A secret is known by the name of its setting, option or parameter, by its place in a URL, or by a form that the keys of
well-known services have. A secret under another name, in another form, is not found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = "***"
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A reference to an environment variable."""
# The lengths in the patterns are bounded, so that no text takes long: what a policy wrote is searched too.
_WORDS = r"passwords?|passwd|pwd|passphrase|secrets?|credentials?|authorization|cookies?|signature"
_OF = "api|access|secret|private|account|auth|admin|encryption|signing|shared|storage|wandb|openai|anthropic|hf|ssh"
_KEYS = rf"(?:{_OF})[_-]?key"
_NAME = re.compile(rf"(?:^|[_.-])(?:{_WORDS}|{_KEYS})$", re.IGNORECASE)
_TOKEN = re.compile(r"(?:^|(?P<kind>[a-z0-9]*)[_.-])token$", re.IGNORECASE)
_TEXT_TOKENS = frozenset(
    re.findall(
        r"\w+",
        "answer audio begin bos cls echo end eos final first image last mask mm new next pad per "
        "placeholder prompt response role sep separator special start stop think thinking tool turn unk video",
    )
)
"""Words before `token` in names of tokens of text, which are no secrets."""
_PLAIN_HEADERS = frozenset(("accept", "accept-encoding", "accept-language", "content-type", "user-agent"))
"""Headers without secrets. Every other value below `headers` counts as one."""
_QUERY_WORDS = frozenset(("key", "auth", "sig", "jwt"))
_PARAMETER = re.compile(r"(?<=[?&])([^=&#\s'\"\\]{1,100})=([^&#\s'\"\\]+)")
_USER = re.compile(
    r"(?<=://)[^\s'\"\\@/:]{0,200}:(?!\d+(?:/|$))[^\s'\"\\@]{1,500}(?=@)"
    r"|(?:(?<=http://)|(?<=https://))[^\s'\"\\@/:?#]{1,500}(?=@)"
)
"""User and password of a URL; of a web address the user alone too."""
_FORMS = {
    "sk-": r"[\w-]{20,}",
    "hf_": r"[A-Za-z0-9]{30,}",
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"\w{30,}"),
    "github_pat_": r"\w{20,}",
    "glpat-": r"[\w-]{20,}",
    "npm_": r"[A-Za-z0-9]{30,}",
    **dict.fromkeys(("xoxa-", "xoxb-", "xoxp-"), r"[\w-]{10,}"),
    **dict.fromkeys(("AKIA", "ASIA"), r"[0-9A-Z]{16}\b"),
    "AIza": r"[\w-]{35}",
    "eyJ": r"[\w-]{10,1000}\.[\w-]{10,}",
}
"""The keys of well-known services: how they begin, and how they go on."""
_FORM = re.compile(
    rf"\b(?:{'|'.join(beginning + rest for beginning, rest in _FORMS.items())})|(?<=Bearer )[^\s'\"\\$]{{16,}}"
)
_BEGINNINGS = (*_FORMS, "Bearer ")
_QUOTED = r"(?<=\")(?:[^\"\\\n]|\\.)++(?=\")|(?<=')(?:[^'\\\n]|\\.)++(?=')"
_VALUE = rf"((?!\$\{{)(?:{_QUOTED})|(?:(?i:bearer|basic|digest|token)\s+)?(?!\$\{{)[^\s,}}\]'\"]+)"
"""A value in quotes up to the closing one; another up to a space, but with what follows the scheme of a header."""
_PAIR = re.compile(rf"(?<![\w.-])([\w.-]{{1,100}})(['\"]?\s?[:=](?:[ \t]{{2,9}}|\s?)['\"]?){_VALUE}")
"""A name and its value in a message: `name: value`, `name=value`."""
_FLAG = re.compile(rf"(?<![\w.-])(--[\w.-]{{1,100}})(['\"]?,?\s['\"]?|=['\"]?){_VALUE}")
"""A name and its value on a command line: `--name value`, `--name=value`, `'--name', 'value'`."""
_WORD = re.compile(r"([\w.-]{1,100})(=|:\s*)(?!\$\{)\S.*", re.DOTALL)
"""A word of a command line that has a name and a value: `--name=value`, `NAME=value`, `Header: value`."""
_MAY_NAME = re.compile(rf"(?:{_WORDS}|key|token)['\"]?[\s:=,]", re.IGNORECASE)
"""Found in every text that names a secret; a quick look for the many texts that do not."""


def is_secret(name: str) -> bool:
    """Return whether a setting, an option or a parameter of this name holds a secret."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    token = _TOKEN.search(name)
    return bool(_NAME.search(name)) or (token is not None and (token["kind"] or "").lower() not in _TEXT_TOKENS)


def redacted(value: Any, name: str = "", *, keep_references: bool = True) -> Any:
    """Return a value, that of the setting `name`, with `***` in place of each secret: all that is below the name of a
    secret, and words and parts of text. References to variables stay, if they are to be kept."""
    if isinstance(value, Mapping):
        below = {key: _name_below(name, str(key)) for key in value}
        return {key: redacted(each, below[key], keep_references=keep_references) for key, each in value.items()}
    if isinstance(value, list | tuple):
        names = (name_of(before) or name for before in ["", *value])
        return [redacted(each, own, keep_references=keep_references) for each, own in zip(value, names, strict=False)]
    if is_secret(name) and not (value is None or value == "" or isinstance(value, bool)):
        is_kept = keep_references and isinstance(value, str) and VARIABLE.fullmatch(value)
        return value if is_kept else HIDDEN
    return _redacted_word(value) if isinstance(value, str) else value


def _name_below(name: str, key: str) -> str:
    """Return the name that says whether the value of `key` below `name` is a secret."""
    is_header = name.lower().endswith("headers") and key.lower() not in _PLAIN_HEADERS
    return "secret" if is_header else name if is_secret(name) else key


def _redacted_word(text: str) -> str:
    """Return a text of a setting without the secrets in it: it may be a word of a command line, or a whole one."""
    word = _WORD.fullmatch(text)
    if word and is_secret(word[1]) and (word[2] == "=" or not word[1].isalpha() or word[1].lower() == "authorization"):
        return f"{word[1]}{word[2]}{HIDDEN}"
    return redacted_parts(_hidden(_FLAG, _is_secret_flag, text) if "--" in text else text)


def name_of(word: object) -> str:
    """Return a word of a command line if it names the value that follows it; else an empty text."""
    return word if isinstance(word, str) and word.startswith("--") and "=" not in word else ""


def redacted_text(text: str) -> str:
    """Return a message or a log line with `***` in place of each secret."""
    if _MAY_NAME.search(text):
        text = _hidden(_FLAG, _is_secret_flag, _hidden(_PAIR, _is_secret_pair, text))
    return redacted_parts(text)


def _hidden(pattern: re.Pattern[str], is_hidden: Callable[[re.Match[str]], bool], text: str) -> str:
    """Return text with `***` for the values to hide. Other values in quotes are searched themselves."""
    parts, kept, place = [], 0, 0
    while found := pattern.search(text, place):
        if is_hidden(found):
            parts += [text[kept : found.start(3)], HIDDEN]
            kept = place = found.end()
        else:
            place = found.start(3) if found[2][-1] in "'\"" else found.end()
    return "".join([*parts, text[kept:]])


def _is_secret_flag(found: re.Match[str]) -> bool:
    return is_secret(found[1])


def _is_secret_pair(found: re.Match[str]) -> bool:
    name, between, _ = found.groups()
    if not is_secret(name):
        return False
    begins_line = not found.string[: found.start()].rpartition("\n")[2].strip(" \t'\"{")
    is_word = name.isalpha() and name.lower() != "authorization"  # perhaps one of a sentence
    return "=" in between or between[0] in "'\"" or begins_line or not is_word


def redacted_parts(text: str) -> str:
    """Return text without the secrets that show by their place in a URL or by their form. JSON stays JSON."""
    if "://" in text and ("@" in text or "?" in text):
        text = _PARAMETER.sub(_hide_parameter, _USER.sub(HIDDEN, text))
    return _FORM.sub(HIDDEN, text) if any(beginning in text for beginning in _BEGINNINGS) else text


def _hide_parameter(found: re.Match[str]) -> str:
    is_hidden = found[1].lower() in _QUERY_WORDS or is_secret(found[1])
    return f"{found[1]}={HIDDEN}" if is_hidden else found[0]
