"""Reads the text of a shell script without running it: its logical lines, the commands in them, and their words, with
known variables filled in."""

from __future__ import annotations

import itertools
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping

_NAME = re.compile(r"\$(?:(\w+|@|\*)|\{(\w+|@|\*)(?:\[[@*]\])?(?::?[-=]([^}]*))?\})|\$\(\(([^()]*)\)\)")
_FOLDER_OF = re.compile(r"\$\(dirname\0+(?:--\0+)?\"?([^$`()\"\0]+)\"?\0*\)")
_HERE = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_ENDS = re.compile(r"\d?>.*|<.*|\|\|?|&&?|;|\d?>&\d")


def lines(text: str, written: dict[str, str]) -> Iterator[tuple[int, str]]:
    """The logical lines with their numbers: continued lines, open quotes and open brackets are joined. Comments are
    left out. A here-document that is the input of a shell becomes part of its line. A here-document that goes to a file
    is put into `written`, by the name of the file."""
    whole, first, ends, document = "", 0, "", list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if ends:
            document.append(line)
            if line.strip() == ends:
                yield from _with_document(first, whole, "\n".join(document[:-1]), written)
                whole, ends, document = "", "", []
            continue
        first = first if whole else number
        whole = _without_comment(whole + (line if whole else line.strip())).rstrip(" \t")
        if not whole.strip():
            whole = ""
            continue
        if whole.endswith("\\"):
            whole = whole[:-1] + " "
            continue
        if _is_open(whole):
            whole += "\n"
            continue
        if here := _HERE.search(whole):
            ends = here[1]
            continue
        yield first, whole
        whole = ""


def _with_document(number: int, line: str, document: str, written: dict[str, str]) -> Iterator[tuple[int, str]]:
    command = _HERE.sub("", line)
    if into := re.search(r">{1,2}\s*['\"]?([\w./-]+)", command):
        written[into[1]] = document
    elif re.fullmatch(r"(?:srun\s.*)?\b(?:ba)?sh(?:\s+-\w+)*\s*", command):
        yield number, f"{command.rstrip()} -c {shlex.quote(document)}"


def _is_open(text: str) -> bool:
    """Whether a quote, or the list of an array, continues in the next line."""
    quote = ""
    for before, char in zip(" " + text, text, strict=False):
        if quote:
            quote = "" if char == quote and before != "\\" else quote
        elif char in "'\"" and before != "\\":
            quote = char
        elif char == "#" and before.isspace():
            break
    array = re.match(r"(?:\w+\s+(?:-\w+\s+)*)?\w+\+?=\(", text)
    return bool(quote) or bool(array and not re.search(r"\)\s*(#.*)?$", text))


def _without_comment(text: str) -> str:
    quote = ""
    for place, (before, char) in enumerate(zip(" " + text, text, strict=False)):
        if quote:
            quote = "" if char == quote and before != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and before.isspace():
            return text[:place]
    return text


def parts(line: str) -> Iterator[str]:
    """The commands of a line, separated by `;`, `&&` or `||`."""
    begin, quote, nested = 0, "", 0
    for place, char in enumerate(line):
        if quote:
            quote = "" if char == quote and line[place - 1] != "\\" else quote
        elif char in "'\"`":
            quote = char
        elif char in "()":
            nested += 1 if char == "(" else -1
        elif not nested and (char == ";" or line[place : place + 2] in ("&&", "||")):
            yield line[begin:place].strip()
            begin = place + (1 if char == ";" else 2)
    yield line[begin:].strip()


def has_command(value: str) -> bool:
    """Whether a command follows the value of a variable, as in `A=1 torchrun train.py`."""
    try:
        return not value.startswith("(") and len(shlex.split(_hidden(value))) > 1
    except ValueError:
        return False


def words_of(text: str, known: Mapping[str, str | list[str]], split: bool = True) -> list[str]:
    """The words of a command, with known variables filled in. As in a shell, the value of a variable without quotes is
    split into words. Text that is only known when the script runs stays as it is."""

    def value_of(found: re.Match[str]) -> str:
        name, braced, other, sum_ = found.groups()
        if sum_ is not None:
            return _sum(sum_, known) or found[0]
        value = known.get(name or braced)
        if value is None:
            return found[0] if other is None else other.strip("'\"")
        return " ".join(map(shlex.quote, value)) if isinstance(value, list) else value

    def list_of(found: re.Match[str]) -> str:
        value = known.get(found[1] or "@")
        return " ".join(map(shlex.quote, value)) if isinstance(value, list) else found[0]

    def rest_of(found: re.Match[str]) -> str:
        return " ".join(map(shlex.quote, known.get("@", [])[int(found[1]) - 1 :]))

    text = re.sub(r'"\$(?:@|\{(\w+)\[@\]\})"', list_of, text)
    text = re.sub(r'"?\$\{[@*]:([1-9])\}"?', rest_of, text)
    single = re.split(r"('[^']*')", text)  # no variable is filled in between single quotes
    filled = "".join(part if n % 2 else _NAME.sub(value_of, _hidden(part)) for n, part in enumerate(single))
    filled = _FOLDER_OF.sub(lambda found: posixpath.dirname(found[1]) or ".", filled)
    if not split:
        try:
            return ["".join(shlex.split(filled))] if filled[:1] in "'\"" else [filled.strip()]
        except ValueError:
            return [filled]
    try:
        words = shlex.split(filled, comments=False)
    except ValueError:
        words = filled.split()
    words = [word.replace("\0", " ") for word in words]
    end = next((n for n, word in enumerate(words) if _ENDS.fullmatch(word)), len(words))
    return words[:end]


def _hidden(text: str) -> str:
    """The text, with each `$(command of words)` turned into one word. A sum, `$((1 + 2))`, is left as it is."""
    found, at = "", 0
    for begin in (one.start() for one in re.finditer(r"\$\(", text)):
        depths = itertools.accumulate((char == "(") - (char == ")") for char in text[begin + 1 :])
        end = next((begin + 2 + n for n, depth in enumerate(depths) if depth == 0), None)
        if begin >= at and end is not None and not re.fullmatch(r"\$\(\([^()]*\)\)", text[begin:end]):
            found, at = found + text[at:begin] + text[begin:end].replace(" ", "\0"), end
    return re.sub(r"`[^`]*`", lambda one: one[0].replace(" ", "\0"), found + text[at:])


def _sum(text: str, known: Mapping[str, str | list[str]]) -> str:
    """The value of an arithmetic expression of integers. Empty if not known."""
    filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda one: str(known.get(one[1], "?")), text)
    total, sign = 0, 1
    for term in re.split(r"([-+])", filled.replace(" ", "")):
        if term in ("+", "-"):
            sign = 1 if term == "+" else -1
            continue
        product = 1
        for factor in term.split("*"):
            if not factor.isdecimal():
                return ""
            product *= int(factor)
        total += sign * product
    return str(total)
