"""The type of config values that are local paths; a URL is an error at its key."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from llmsys.local_path import check_local_path

LocalPath = Annotated[Path, BeforeValidator(check_local_path)]
