"""What is said of a file that is no YAML: where, what, and what to do, without the words of YAML's grammar."""

from pathlib import Path

import pytest

from torchaos.harness.scenario import yaml_source

_HEAD = "scenario: kill-rank\njob:\n  command: torchrun train.py\n"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (
            "faults:\n  - inject: a\n   target: {rank: 1}\n    when: {step: 2}\n",
            "6:4",
            "by 3 spaces, which fits no line",
        ),
        (" timeout: 5m\n", "4:2", "by 1 space, which fits no line"),
        ("assert:\n  - completed\n  restarts: 3\n", "6:3", "begins with '- ' is expected here, as in line 5"),
        ("  faults:\n- inject: a\n", "5:1", "a `key: value` is expected here, as in line 1"),
        ("seed 3\nassert: [completed]\n", "5:1", "add the colon"),
        ("    timeout: 5m\n", "4:12", "a colon is out of place"),
        ("when: {step: 3\nassert: []\n", "5:7", "a ',' or a '}' is missing"),
        ("assert: [a b: c}\n", "4:16", "is missing"),
        ("assert: [\n  - completed\n", "5:3", "a '[' or a '{' before this is not closed"),
        ("faults:\n  - {inject: a,\n  - inject: b\n", "6:3", "a '[' or a '{' before this is not closed"),
        ("assert: [completed]]\n", "4:20", "the value is over before this"),
        ("cwd: {run}/a b\n", "4:11", "quote the whole value"),
        ('description: "abc\nassert: [completed]\n', "6:1", "inside quotes or brackets"),
        ("description: @home\n", "4:14", "can't begin with '@'; quote it"),
        ("description: *home\n", "4:14", "*home is an alias that no &home defines"),
        ("description: *\n", "4:15", "quote the text"),
        ("description: |abc\n", "4:15", "begins on the next line"),
        ("\tseed: 3\n", "4:1", "a tab can't be used"),
    ],
)
def test_each_is_told_with_its_place(text: str, place: str, words: str) -> None:
    """The place is that of the mistake, or where the file can't be read any further."""
    with pytest.raises(yaml_source.ScenarioError) as caught:
        yaml_source.parse(Path("a.yaml"), _HEAD + text)
    told = str(caught.value)
    assert told.startswith(f"a.yaml:{place}: ")
    assert words in told
    assert "expected" not in told.replace("is expected here", "")


def test_a_file_of_another_kind_is_doubted() -> None:
    """A script that is given in place of a scenario is not only called bad YAML; a scenario is."""
    for name, doubted in (("train.py", True), ("a.yaml", False), ("a", False)):
        with pytest.raises(yaml_source.ScenarioError) as caught:
            yaml_source.parse(Path(name), "def f(x: int) -> int:\n    return x\n")
        assert ("is train.py the right one?" in str(caught.value)) is doubted
