"""Errors of requests to the Hub as errors of slapo_zoo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slapo_zoo.errors import SlapoError, is_full


@contextmanager
def hub_errors(make: Callable[[str, Exception], SlapoError]) -> Iterator[None]:
    """Context in which a request to the Hub that fails raises the error that `make` returns; errors of the disk pass.

    `make` gets the problem as text ("the Hub answered: ..." or "no answer of the Hub: ...") and the client's exception.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx  # pyright: ignore[reportAttributeAccessIssue]

    refused = errors.HFValidationError, errors.EntryNotFoundError, errors.NotASafetensorsRepoError
    try:
        yield
    except (httpx.HTTPError, *refused, OSError) as error:
        if getattr(error, "filename", None) is not None or (isinstance(error, OSError) and is_full(error)):  # fmt: skip
            raise
        who = "the Hub answered" if hasattr(error, "response") else "no answer of the Hub"
        text = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
        raise make(f"{who}: {text.splitlines()[0]:.300}", error) from error
