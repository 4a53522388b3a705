"""Arguments and options that several commands share, and the group that they belong to."""

from __future__ import annotations

from pathlib import Path

import click

PATH = click.Path(path_type=Path)
FILES = click.argument("files", nargs=-1, required=True, type=PATH)
SEED = click.option("--seed", type=int, help="Use this seed instead of the scenario's.")
ATTACH = click.option("--attach", type=int, metavar="PID", help="Use the torchrun that runs as PID, not job.command.")
JUNIT = click.option("--junit", "junit_file", type=PATH, help="Write JUnit XML here.")
JSON = click.option("--json", "json_file", type=PATH, help="Write all results as JSON here.")
CONSENT = click.option(
    "--consent", multiple=True, metavar="WHAT", help="Allow what may hurt the host; the scenario must allow it too."
)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value, such as job.timeout=2m."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torchaos")
def cli() -> None:
    """Chaos engineering for distributed PyTorch training."""
