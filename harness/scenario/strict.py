"""The base class and small types of all grammars: scenarios, game days and gates."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[a-z0-9][a-z0-9._-]*$"
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Refuses unknown keys, and converts no values: `"3"` is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=False)
