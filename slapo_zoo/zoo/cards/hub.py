"""Download of cards (published schedules) from the Hub, pinned to a commit, and upload of a card as one commit."""

import json
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_zoo.errors import CardError
from slapo_zoo.hf.hub_errors import hub_errors
from slapo_zoo.zoo.cards import files
from slapo_zoo.zoo.cards.card import read_card

SHA = re.compile(r"[0-9a-f]{40}\Z")
_REFERENCE = re.compile(r"([\w][\w.-]{0,95}/[\w][\w.-]{0,95})(?:@([\w][\w./-]{0,120}))?\Z", re.ASCII)  # fmt: skip
ALLOWED = [files.PROGRAM, files.README, *files.REPORTS]


@dataclass(frozen=True)
class Reference:
    """Hub repository and revision, written `org/name@revision`; the revision defaults to main."""

    repo_id: str
    revision: str = "main"

    @staticmethod
    def parse(text: str) -> "Reference":
        """Return the Reference for `org/name@revision` or `org/name` (revision main); CardError for any other text."""
        found = _REFERENCE.match(text)
        if not found or ".." in text:
            hint = 'pass a folder, "org/name@<sha>" or "org/name@<tag>"'
            problem = "this is neither a folder nor the name of a Hub repository"
            raise CardError("card", f"{text!r:.120}", problem, hint)
        return Reference(found[1], found[2] or "main")

    @property
    def is_pinned(self) -> bool:
        """Return whether the revision is a commit sha, whose content cannot change."""
        return SHA.match(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}"


@dataclass(frozen=True)
class Pulled:
    """Card (published schedule) that was downloaded into the Hub's cache.

    Args:
        folder: folder with the card's files.
        root: directory of the repository in the Hub's cache; symbolic links in `folder` lead to files below `root`.
        reference: the repository, with the sha of the downloaded commit as revision.
    """

    folder: Path
    root: Path
    reference: Reference


def pull(reference: Reference, with_python: bool = False) -> Pulled:
    """Download the files of a card (a published schedule) into the Hub's cache, and no other files of its repository.

    A branch or a tag is resolved to a commit sha first. CardError is raised if a tag names another
    commit than at its last download on this machine: someone has moved the tag.

    Args:
        reference: repository and revision.
        with_python: download `schedule.py` too.
    """
    from huggingface_hub import snapshot_download

    pinned = reference if reference.is_pinned else _resolve(reference)
    patterns = [*ALLOWED, files.PYTHON] if with_python else ALLOWED
    with card_errors(str(reference)):
        _check_sizes(pinned, patterns)
        folder = Path(snapshot_download(pinned.repo_id, revision=pinned.revision, allow_patterns=patterns))  # fmt: skip
    wanted = files.PYTHON if with_python else files.PROGRAM
    if not (folder / wanted).exists():
        hint = "check name and revision: a card has schedule.json or, for trust_remote_code=True and a sha, schedule.py"
        raise CardError("card", str(reference), f"{wanted} is missing", hint)
    return Pulled(folder, folder.parent.parent, pinned)


def _check_sizes(pinned: Reference, names: list[str]) -> None:
    """Raise CardError if a file with one of `names`, in the repository at commit `pinned`, is larger than 1 MiB."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():  # offline, only the cache is read
        return
    info = HfApi().model_info(pinned.repo_id, revision=pinned.revision, files_metadata=True)
    for file in info.siblings or []:
        if file.rfilename in names and not 0 <= (file.size or 0) <= files.MAX_FILE:
            problem = f"{file.rfilename} has {file.size} bytes, expected at most {files.MAX_FILE}"
            hint = "nothing was fetched; choose another card, or ask its author for a smaller file"
            raise CardError("card", str(pinned), problem, hint)


def push(
    folder: Path,
    repo_id: str,
    token: str | None = None,
    private: bool | None = None,
    tag: str | None = None,
    message: str = "Publish a schedule card",
    parent: str | None = None,
) -> Reference:
    """Upload the folder of a schedule card to the Hub as one commit, and return the reference org/name@sha of that commit.

    Args:
        folder: folder of the card; its files are checked first.
        repo_id: Hub repository org/name; it is created if missing.
        token: Hub token; None uses the one of `hf auth login`.
        private: make a new repository private; None uses the default of the Hub.
        tag: tag to create for the commit; an existing tag is not moved.
        message: commit message.
        parent: sha that must be the newest commit of the repository; None accepts any newest commit.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    read_card(folder)
    names = [n for n in files.names_of(folder) if n in ALLOWED or n.endswith(".png")]
    operations = [CommitOperationAdd(name, str(folder / name)) for name in names]
    api = HfApi(token=token)
    with card_errors(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        before = parent or api.model_info(repo_id).sha
        commit = api.create_commit(repo_id, operations, commit_message=message, parent_commit=before)  # fmt: skip
        if tag:
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return Reference(repo_id, commit.oid)


def _resolve(reference: Reference) -> Reference:
    """Return a Hub reference with its branch or tag replaced by the commit sha; offline, by the sha last downloaded."""
    from huggingface_hub import HfApi, constants

    seen = _read_seen()
    if constants.is_offline_mode():
        if str(reference) not in seen:
            problem = "the Hub is offline for this process, and the card was not fetched before"
            hint = "unset HF_HUB_OFFLINE, or name a revision that was fetched before"
            raise CardError("card", str(reference), problem, hint)
        return Reference(reference.repo_id, seen[str(reference)]["sha"])
    with card_errors(str(reference)):
        refs = HfApi().list_repo_refs(reference.repo_id)
    tags = {tag.name: tag.target_commit for tag in refs.tags}
    branches = {branch.name: branch.target_commit for branch in refs.branches}
    sha = tags.get(reference.revision) or branches.get(reference.revision)
    if sha is None:
        known = ", ".join(sorted({*tags, *branches})) or "none"
        problem = "the repository has no such branch or tag"
        raise CardError("card", str(reference), problem, f"choose one of: {known:.300}")
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
    """Return "org/name@revision" --> {"sha": commit} for each schedule card that this user downloaded from the Hub."""
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


def card_errors(what: str) -> AbstractContextManager[None]:
    """Return a context that turns errors of requests to the Hub into a CardError about `what`, e.g. a repository."""
    from huggingface_hub import errors

    hints: list[tuple[Any, str]] = [
        (errors.RepositoryNotFoundError, "check its name; for a private one, log in with `hf auth login`"),
        (errors.RevisionNotFoundError, "check the sha or tag"),
        ((errors.EntryNotFoundError, errors.OfflineModeIsEnabled), "check the network, or name a card that was downloaded before"),
        (errors.HfHubHTTPError, "log in with `hf auth login`, or try later"),
        (Exception, "check the name, the token and the network"),
    ]  # fmt: skip

    def say(said: str, error: Exception) -> CardError:
        hint = next(hint for kinds, hint in hints if isinstance(error, kinds))
        if getattr(getattr(error, "response", None), "status_code", None) == 412:
            hint = "someone else published meanwhile to this repository: look at their commit, then push again"
        return CardError("card", what, said, hint)

    return hub_errors(say)
