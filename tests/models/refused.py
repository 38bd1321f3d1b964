"""What a load is refused with."""

import pytest

from sprinter.errors import UserError
from sprinter.models.pair import load_models


def refusal(*args: object, **options: object) -> str:
    """The line with which ``load_models`` refuses."""
    with pytest.raises(UserError) as caught:
        load_models(*args, **options)  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line
    return line
