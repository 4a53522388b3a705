"""Reads command lines and batch scripts without running them: the programs before a training script and their options,
#SBATCH lines, variables, and the line that starts the job; and the text of a shell script: its logical lines, the
commands in them, and their words, with known variables filled in."""

from __future__ import annotations

import itertools
import posixpath
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


SHORT = {  # of srun and sbatch (their man pages)
    "-N": "nodes", "-n": "ntasks", "-p": "partition", "-A": "account", "-q": "qos", "-t": "time", "-J": "job-name",
    "-o": "output", "-e": "error", "-i": "input", "-c": "cpus-per-task", "-C": "constraint", "-w": "nodelist",
    "-x": "exclude", "-G": "gpus", "-D": "chdir", "-a": "array", "-d": "dependency", "-m": "distribution",
}  # fmt: skip
_SWITCHES = (  # of srun and sbatch; all other options have a value
    "exclusive", "label", "unbuffered", "overlap", "exact", "kill-on-bad-exit", "requeue", "no-requeue", "no-kill",
    "overcommit", "oversubscribe", "pty", "verbose", "quiet", "wait-all-nodes", "container-writable", "parsable",
    "no-container-mount-home", "container-mount-home", "container-remap-root", "no-container-entrypoint", "hold",
    "wait",
)  # fmt: skip
_SHORT_SWITCHES = ("-l", "-u", "-K", "-O", "-s", "-v", "-Q", "-W", "-H", "-k", "-X")
_PYTHON = re.compile(r"(.*/)?python(\d(\.\d+)?)?")


def first_program(words: Sequence[str]) -> str:
    return words[0].rpartition("/")[2] if words else ""


def is_python(word: str) -> bool:
    return bool(_PYTHON.fullmatch(word))


def is_start(words: Sequence[str]) -> int:
    """How likely a line is to start the job. 3: it has a launcher of ranks, such as torchrun. 2: it is a step of Slurm
    or MPI. 1: it runs a Python script, or submits a batch script. 0: it does not start the job."""
    text = " ".join(words)
    runs = re.search(r"\S\.py\b|(?<!\S)-m +(?!pip|venv|ensurepip)[\w.]+|\.sh\b", text)
    if re.search(r"(^|[\s/'\"])(torchrun|deepspeed)\s|torch\.distributed\.(run|launch)\b|accelerate\s+launch", text):
        return 3 if first_program(words) not in ("echo", "which", "printf") else 0
    if first_program(words) in ("srun", "mpirun", "mpiexec", "prun"):
        return 2 if runs or re.search(r"container-image|apptainer|singularity|enroot", text) else 0
    if first_program(words) == "sbatch":
        return 1
    known = is_python(words[0]) or first_program(words) in ("apptainer", "singularity", "enroot", "docker", "podman")
    return 1 if known and runs else 0


def slurm_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options of srun or sbatch by their long names, and the words after the options."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            name, value, equals = word[:2], word[2:], word[2:]
            if name in _SHORT_SWITCHES:
                continue
            value = value.removeprefix("=")
        long = SHORT.get(name, name.lstrip("-"))
        if not equals and long not in _SWITCHES and rest:
            value = rest.pop(0)
        found[long] = value
    return found, rest


def options_before_script(words: Sequence[str], switches: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The options of a launcher, by name (with `_`), and the words from the script or module on. `switches`: the
    options that have no value, besides `-m` (a module follows in place of a script)."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = "module" if name == "m" else name
        if not equals and name != "module" and name not in switches and rest:
            value = rest.pop(0)
        found[name] = value
    return found, rest


def with_option(words: Sequence[str], begin: int, end: int, name: str, value: str) -> list[str]:
    """The words with the option `--name value` in the part from `begin` to `end`. If the option is there already, it is
    replaced; otherwise it is added at the beginning of the part."""
    found, replaced, at = list(words[:begin]), False, begin
    while at < end:
        option, equals, _ = words[at].partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            at += 1 if equals else 2
            found += [] if replaced else [f"--{name}", value]
            replaced = True
        else:
            found.append(words[at])
            at += 1
    whole = [*found, *words[end:]]
    return whole if replaced else [*words[:begin], f"--{name}", value, *words[begin:]]


def without_options(
    words: Sequence[str], begin: int, end: int, names: Mapping[str, bool]
) -> tuple[list[str], list[str]]:
    """The words without the options `names` in the part from `begin` to `end`, and the options that were left out.
    `names`: for each option (with `-`), whether it has a value."""
    found, dropped, at = list(words[:begin]), [], begin
    while at < end:
        option, equals, _ = words[at].partition("=")
        name = option[2:].replace("_", "-") if option.startswith("--") else ""
        if name in names:
            count = 2 if names[name] and not equals else 1
            dropped.append(" ".join(words[at : at + count]))
            at += count
        else:
            found.append(words[at])
            at += 1
    return [*found, *words[end:]], dropped


_SET = re.compile(r"(?:(export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_BLOCKS = {"if": 1, "for": 1, "while": 1, "until": 1, "case": 1, "fi": -1, "done": -1, "esac": -1}
_KEYWORDS = ("then", "else", "do", "time", "exec", "eval", "command")
_PREPARES = ("module", "source", ".", "conda", "micromamba", "ml", "spack")
# Variables that launchers set, or that belong to the machine.
_LATER = re.compile(r"(MASTER|WORLD_SIZE|(LOCAL_|NODE_)?RANK$|SLURM_|PATH$|LD_)")


@dataclass
class Batch:
    """The facts in a batch script. `options`: of its #SBATCH lines, by their long names. `commands`: lines that may
    start the job: the number and the words of each. `exported`: exported variables whose values are known."""

    options: dict[str, str] = field(default_factory=dict)
    commands: list[tuple[int, list[str]]] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    prepares: list[str] = field(default_factory=list)  # such as `module load cuda`
    folder: str = ""  # of the last `cd` before the job
    written: dict[str, str] = field(
        default_factory=dict
    )  # here-documents that the script writes into files, by file name

    @property
    def job(self) -> tuple[int, list[str]] | None:
        """The line that most likely starts the job: its number and its words. The first of equally likely lines
        counts."""
        return max(self.commands, key=lambda one: is_start(one[1]), default=None)


def read_batch(path: Path, args: Sequence[str], env: Mapping[str, str], given: Mapping[str, str]) -> Batch:
    """The facts in a script file. `args`: the arguments of the script. `env`: the variables that are known when it
    starts. `given`: options of sbatch on the command line. Raises OSError if the file can't be read."""
    return parse_batch(path.read_text(errors="replace"), args, {**env, "0": str(path)}, given)


def parse_batch(text: str, args: Sequence[str], env: Mapping[str, str], given: Mapping[str, str]) -> Batch:
    found = Batch()
    for line in itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines()):
        if line.startswith("#SBATCH"):
            with_comment = shlex.split(line[7:], comments=True)
            found.options |= slurm_options(with_comment)[0]
    found.options |= given
    known: dict[str, str | list[str]] = {
        **{name: value for name, value in env.items() if not name.startswith("SLURM_")}, **_of_slurm(found.options),
        **_positional(args),
    }  # fmt: skip
    depth = 0
    for number, line in lines(text, found.written):
        for part in parts(line):
            word = part.split(None, 1)[0] if part.split() else ""
            depth += _BLOCKS.get(word, 0)
            if (set_ := _SET.fullmatch(part)) and not (set_[1] is None and has_command(set_[4])):
                _assign(set_, known, found, depth)
                continue
            words = words_of(part, known)
            if words[:1] == ["shift"]:
                args = args[int(words[1]) if words[1:] and words[1].isdecimal() else 1 :]
                known = {**{name: value for name, value in known.items() if not name.isdecimal()}, **_positional(args)}
            _note(number, words, found, known)
    return found


def _positional(args: Sequence[str]) -> dict[str, str | list[str]]:
    return {"@": list(args), "*": list(args), **{str(number): word for number, word in enumerate(args, 1)}}


def _note(number: int, words: list[str], found: Batch, known: dict[str, str | list[str]]) -> None:
    while words and (words[0] in _KEYWORDS or words[0] in _BLOCKS):
        words = words[1:]
    if not words:
        return
    if words[0] in _PREPARES:
        found.prepares.append(" ".join(words))
    elif words[0] in ("cd", "pushd") and len(words) > 1:
        found.folder = words[1]
    elif words[0] == "export":
        for name in words[1:]:
            value = known.get(name)
            if isinstance(value, str) and not _LATER.match(name) and "$" not in value:
                found.exported[name] = value
    elif is_start(words):
        found.commands.append((number, words))


def _assign(set_: re.Match[str], known: dict[str, str | list[str]], found: Batch, depth: int) -> None:
    how, name, more, text = set_.groups()
    if depth and name in known and not more:
        return  # in a branch that may not be taken
    value: str | list[str]
    if text.startswith("("):
        value = words_of(text[1:].rstrip().removesuffix(")"), known)
        before = known.get(name)
        known[name] = [*before, *value] if more and isinstance(before, list) else value
        return
    words = words_of(text, known, split=False)
    value = words[0] if words else ""
    known[name] = f"{known.get(name, '')}{value}" if more else value
    if how == "export" and not _LATER.match(name) and not re.search(r"[$`]", value):
        found.exported[name] = value


def _of_slurm(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that Slurm will set, as far as the options show."""
    nodes, tasks = nodes_of(options), tasks_of(options)
    gpus = gpus_of(options)
    return {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes)),
        "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NTASKS": str(tasks * nodes), "SLURM_NPROCS": str(tasks * nodes),
        **(dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), str(gpus)) if gpus else {}),
        **({"SLURM_CPUS_PER_TASK": options["cpus-per-task"]} if "cpus-per-task" in options else {}),
    }  # fmt: skip


def nodes_of(options: Mapping[str, str]) -> int:
    word = options.get("nodes", "1").partition("-")[0]
    return int(word) if word.isdecimal() else 1


def tasks_of(options: Mapping[str, str]) -> int:
    """The tasks on each node."""
    nodes = nodes_of(options)
    for name, divide in (("ntasks-per-node", 1), ("ntasks", nodes)):
        if options.get(name, "").isdecimal():
            return max(1, int(options[name]) // divide)
    return 1


def gpus_of(options: Mapping[str, str]) -> int | None:
    """The GPUs of each node. None if the options do not give the number."""
    for name, times, divide in (
        ("gpus-per-node", 1, 1), ("gpus-per-task", tasks_of(options), 1), ("gres", 1, 1),
        ("gpus", 1, nodes_of(options)),
    ):  # fmt: skip
        value = options.get(name, "")
        count = re.search(r"(?:^|:)(\d+)(?:\(.*)?$", value)
        if count and (name != "gres" or value.startswith("gpu")):
            return int(count[1]) * times // divide
    return None


def allocation_of(options: Mapping[str, str]) -> list[str]:
    """The options as variables of salloc, such as SALLOC_PARTITION=gpu."""
    wanted: Iterable[str] = ("partition", "account", "qos", "constraint", "gres", "gpus-per-node", "reservation")
    found = [
        f"SALLOC_{name.upper().replace('-', '_')}={shlex.quote(options[name])}" for name in wanted if name in options
    ]
    return [*found, *(["SALLOC_EXCLUSIVE=1"] if "exclusive" in options else [])]
