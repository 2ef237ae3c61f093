"""Cards on the Hub: fetched by the sha of a commit, pushed as one commit that nobody overtook."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_zoo.cards import files
from slapo_zoo.cards.card import read_card
from slapo_zoo.errors import CardError

SHA = re.compile(r"[0-9a-f]{40}\Z")
_REFERENCE = re.compile(
    r"([\w][\w.-]{0,95}/[\w][\w.-]{0,95})(?:@([\w][\w./-]{0,120}))?\Z", re.ASCII
)
ALLOWED = [files.PROGRAM, files.README, *files.REPORTS]


@dataclass(frozen=True)
class Reference:
    """`org/name@revision`; without a revision, its main branch."""

    repo_id: str
    revision: str = "main"

    @staticmethod
    def parse(text: str) -> "Reference":
        """Parse `org/name@revision`; CardError for any other text."""
        found = _REFERENCE.match(text)
        if not found or ".." in text:
            hint = 'pass a folder, "org/name@<sha>" or "org/name@<tag>"'
            raise CardError("card", f"{text!r:.120}", "no folder and no name of a repository", hint)
        return Reference(found[1], found[2] or "main")

    @property
    def is_pinned(self) -> bool:
        """Return whether it names a commit, which nobody can change."""
        return SHA.match(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}"


@dataclass(frozen=True)
class Pulled:
    """A card that was fetched into the Hub's cache.

    Args:
        folder: with the files of the card.
        root: of the repository in the cache; links stay below it.
        reference: pinned to the sha that was fetched.
    """

    folder: Path
    root: Path
    reference: Reference


def pull(reference: Reference, with_python: bool = False) -> Pulled:
    """Fetch the named files of a card into the cache, and no others.

    A branch or a tag is resolved to a sha first. A tag that named another commit when it was
    seen last is an error: someone moved it.

    Args:
        reference: repository and revision.
        with_python: `schedule.py` too.
    """
    from huggingface_hub import snapshot_download

    pinned = reference if reference.is_pinned else _resolve(reference)
    patterns = [*ALLOWED, files.PYTHON] if with_python else ALLOWED
    with readable(str(reference)):
        _check_sizes(pinned, patterns)
        folder = Path(
            snapshot_download(pinned.repo_id, revision=pinned.revision, allow_patterns=patterns)
        )
    wanted = files.PYTHON if with_python else files.PROGRAM
    if not (folder / wanted).exists():
        hint = "check the name; a schedule in Python wants trust_remote_code=True and a sha"
        raise CardError("card", str(reference), f"{wanted} is missing", hint)
    return Pulled(folder, folder.parent.parent, pinned)


def _check_sizes(pinned: Reference, names: list[str]) -> None:
    """CardError for files that are too large to be a card's, before a byte of them is fetched."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():  # what is in the cache is there already
        return
    info = HfApi().model_info(pinned.repo_id, revision=pinned.revision, files_metadata=True)
    for file in info.siblings or []:
        if file.rfilename in names and not 0 <= (file.size or 0) <= files.MAX_FILE:
            problem = f"{file.rfilename} has {file.size} bytes, expected at most {files.MAX_FILE}"
            raise CardError("card", str(pinned), problem, "a card is small; nothing was fetched")


def push(
    folder: Path,
    repo_id: str,
    token: str | None = None,
    private: bool | None = None,
    tag: str | None = None,
    message: str = "Publish a schedule card",
    parent: str | None = None,
) -> Reference:
    """Publish a folder as one commit; returns the reference that users should write down.

    Args:
        folder: of a card; it is checked first.
        repo_id: is made when it is not there.
        token: None takes the one of `hf auth login`.
        private: of a new repository.
        tag: a name for the commit; an existing one is not moved.
        message: of the commit.
        parent: the sha that the repository must still be at; None takes what it is at now.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    read_card(folder)
    names = [n for n in files.names_of(folder) if n in ALLOWED or n.endswith(".png")]
    operations = [CommitOperationAdd(name, str(folder / name)) for name in names]
    api = HfApi(token=token)
    with readable(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        before = parent or api.model_info(repo_id).sha
        commit = api.create_commit(
            repo_id, operations, commit_message=message, parent_commit=before
        )
        if tag:
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return Reference(repo_id, commit.oid)


def _resolve(reference: Reference) -> Reference:
    """The commit that a branch or tag names now; offline, the one that it named last."""
    from huggingface_hub import HfApi, constants

    seen = _read_seen()
    if constants.is_offline_mode():
        if str(reference) not in seen:
            problem = "offline, and it was not fetched before"
            raise CardError("card", str(reference), problem, "name a sha that is in the cache")
        return Reference(reference.repo_id, seen[str(reference)]["sha"])
    with readable(str(reference)):
        refs = HfApi().list_repo_refs(reference.repo_id)
    tags = {tag.name: tag.target_commit for tag in refs.tags}
    branches = {branch.name: branch.target_commit for branch in refs.branches}
    sha = tags.get(reference.revision) or branches.get(reference.revision)
    if sha is None:
        known = ", ".join(sorted({*tags, *branches})) or "none"
        problem = "the repository has no such branch or tag"
        raise CardError("card", str(reference), problem, f"it has: {known:.300}")
    before = seen.get(str(reference), {}).get("sha")
    if reference.revision in tags and before not in (None, sha):
        problem = f"the tag named {before} before, now it names {sha}: it was moved"
        hint = f"look at what changed, then name the commit: {reference.repo_id}@{sha}"
        raise CardError("card", str(reference), problem, hint)
    _write_seen(seen | {str(reference): {"sha": sha}})
    return Reference(reference.repo_id, sha)


def _seen_file() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "slapo_zoo" / "revisions.json"


def _read_seen() -> dict[str, Any]:
    """Reference --> the sha that it named when it was last fetched."""
    try:
        found = json.loads(_seen_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {k: v for k, v in entries if isinstance(v, dict) and SHA.match(str(v.get("sha")))}


def _write_seen(seen: dict[str, Any]) -> None:
    path = _seen_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(seen, indent=1), encoding="utf-8")
    os.replace(part, path)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn an error of the Hub's client into a SlapoError."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except RepositoryNotFoundError as error:
        raise _hub_error(what, error, "check its name; private ones need a token") from error
    except RevisionNotFoundError as error:
        raise _hub_error(what, error, "check the sha or tag") from error
    except (LocalEntryNotFoundError, EntryNotFoundError, OfflineModeIsEnabled) as error:
        raise _hub_error(what, error, "check the network, or take one from the cache") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        moved = status == 412
        hint = "someone else published meanwhile: look at it, then push again" if moved else ""
        raise _hub_error(
            what, error, hint or "log in with `hf auth login`, or try later"
        ) from error
    except (HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise _hub_error(what, error, "check the name, the token and the network") from error


def _hub_error(what: str, error: Exception, hint: str) -> CardError:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    problem = f"the Hub answered: {lines[-1] if lines else type(error).__name__:.200}"
    return CardError("card", what, problem, hint)
