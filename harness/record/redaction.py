"""Keeps secrets out of records and reports. A secret is recognised by the name of a variable or an option, by its form,
or because this process's environment has the same value under such a name. The job itself gets everything unmasked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

MASK = "***"
NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|PASSPHRASE|KEY|CREDENTIAL", re.IGNORECASE)
_OPTION_NAME = (
    r"[\w.-]*(?:token(?!iz)|secret|passw(?:or)?d|passphrase|credential|(?:api|access|private|auth)[-_]?key)[\w.-]*"
)
_OPTION = re.compile(rf"""(?i)((?<![\w-])--?{_OPTION_NAME})(=|\s+)('[^']*'|"[^"]*"|[^\s'"-][^\s'"]*)""")
_OPTION_ALONE = re.compile(rf"(?i)--?{_OPTION_NAME}")
# NAME=value, also after a dotted path as in `--set job.env.NAME=value`. A quoted value is masked as a whole.
_ASSIGNMENT = re.compile(r"""(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]*)=('[^']*'|"[^"]*"|[^\s'"]+)""")
# `NAME: value` of YAML and JSON. A value without quotes goes to the end of the line; `|` begins a block.
_PAIR = re.compile(r"""(?<![\w.-])(\\?["']|)([\w-]+)\1[ \t]*:[ \t]*""")
_PAIR_NAME = re.compile(
    r"(?i)[\w-]*(?:token|(?:secret|passw(?:or)?d|passphrase|credential|(?:api|access|private|auth)[-_]?key)[\w-]*)"
)
_VALUE = re.compile(r"""[|>][-+\d]*(?=\s)|"(?:[^"\\\n]|\\.)*"|'(?:[^'\n]|'')*'|(?!//|:)\S[^\n]*""")
_COUNT = re.compile(r"[\d.]+(?![^\s,}\]])")  # `token: 512`
_LOOKS = re.compile(
    r"(?<=://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)"  # user:password of an address
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS access keys
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bglpat-[\w-]{20,}|\bAIza[\w-]{35}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"  # JSON web tokens
    r"|(?<=[Bb]earer )[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_PLACEHOLDERS = ("VALUE", "...", "…")
_SHORTEST = 8  # characters; shorter values are ordinary words, so texts are not searched for them


def is_secret(name: str) -> bool:
    """Whether a variable of that name holds a secret."""
    return bool(NAME.search(name))


def mask(text: str) -> str:
    for value in _own_secrets():
        text = text.replace(value, MASK)
    text = _pairs_masked(_LOOKS.sub(lambda found: _masked(found[0]), text))
    text = _ASSIGNMENT.sub(lambda found: f"{found[1]}={MASK}" if _assigns_a_secret(found) else found[0], text)
    return _OPTION.sub(lambda found: found[0] if _is_number(found[3]) else f"{found[1]}{found[2]}{MASK}", text)


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    return {name: MASK if is_secret(name) else mask(value) for name, value in env.items()}


def mask_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command, masked. The word after an option such as `--token` counts as a secret too."""
    found: list[str] = []
    behind = False
    for word in words:
        secret = behind and not word.startswith("-") and not _is_number(word)
        found.append(MASK if secret else mask(word))
        behind = bool(_OPTION_ALONE.fullmatch(word))
    return tuple(found)


def forget() -> None:
    """Clears the cache, because the environment has changed."""
    _own_secrets.cache_clear()


@lru_cache(maxsize=1)
def _own_secrets() -> tuple[str, ...]:
    """Secret values of this process's environment. Paths are left out, because masking them would make every other path
    unreadable."""
    values = {value for name, value in os.environ.items() if is_secret(name) and len(value) >= _SHORTEST}
    return tuple(sorted((value for value in values if not value.startswith(("/", "."))), key=len, reverse=True))


def _pairs_masked(text: str) -> str:
    parts, at = list[str](), 0
    for found in _PAIR.finditer(text):
        value = _VALUE.match(text, found.end())
        if found.start() < at or not value or not _is_secret_pair(found[2], text[found.end() : found.end() + 40]):
            continue
        end = value.end()
        if value[0][0] in "|>":  # and all lines that are indented more than the name
            line = text.rfind("\n", 0, found.start()) + 1
            indent = len(text[line:]) - len(text[line:].lstrip(" "))
            block = re.compile(rf"[^\n]*(?:\n(?: {{{indent + 1},}}[^\n]*|[ \t]*(?=\n)))*").match(text, end)
            end = block.end() if block else end
        parts += [text[at : found.end()], _masked(text[found.end() : end])]
        at = end
    return "".join((*parts, text[at:]))


def _is_secret_pair(name: str, value: str) -> bool:
    if name.isupper():
        return is_secret(name)
    return bool(_PAIR_NAME.fullmatch(name)) and not (name.lower().endswith("token") and _COUNT.match(value))


def _assigns_a_secret(found: re.Match[str]) -> bool:
    """Whether `NAME=VALUE` contains a secret. False if VALUE is only a placeholder, as in documentation."""
    return is_secret(found[1]) and found[2].rstrip(",.;:)") not in _PLACEHOLDERS


def _masked(text: str) -> str:
    """The masked text. It has as many lines as before."""
    return MASK + "\n" * text.count("\n")


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()
