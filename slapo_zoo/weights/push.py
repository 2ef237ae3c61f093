"""Upload a saved model to the Hub, for `save_pretrained(..., push_to_hub=True)`."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from slapo_zoo.errors import WeightsError
from slapo_zoo.hf.hub_errors import hub_errors

# Files that a save writes; other files of the folder are not uploaded.
PATTERNS = ["model*.safetensors", "model.safetensors.index*.json", "*config.json", "README.md",
            "schedule.json", "checksums.json"]  # fmt: skip


class Push:
    """Upload to one Hub repository, which is created before the save so that a missing token fails early.

    Args:
        folder: folder of the saved model; its name is the default of `repo_id`.
        arguments: any of repo_id, token, private, commit_message, commit_description, create_pr, revision, by name.
    """

    ALLOWED = ("repo_id", "token", "private", "commit_message", "commit_description", "create_pr", "revision")  # fmt: skip

    def __init__(self, folder: Path, arguments: dict[str, Any]):
        self.folder, self.options = folder, dict(arguments)
        self.token = self.options.pop("token", None)
        self.repo_id = self.options.pop("repo_id", None) or folder.resolve().name
        self.private = self.options.pop("private", None)

    def create(self) -> None:
        """Create the repository unless it exists; a `repo_id` without organisation gets the user's name."""
        from huggingface_hub import HfApi

        with self._answered("log in with `hf auth login`, or pass token=; nothing was saved"):
            api = HfApi(token=self.token)
            made = api.create_repo(self.repo_id, private=self.private, exist_ok=True)
        self.repo_id = made.repo_id

    def upload(self) -> None:
        """Upload the files that the save wrote as one commit."""
        from huggingface_hub import HfApi

        options = {"commit_message": "Upload model", **self.options}
        with self._answered(f"the model is saved in {self.folder}; upload it with `hf upload`"):
            HfApi(token=self.token).upload_folder(
                repo_id=self.repo_id, folder_path=self.folder, allow_patterns=PATTERNS, **options
            )

    def _answered(self, hint: str) -> AbstractContextManager[None]:
        """Return a context in which a request to the Hub that fails raises WeightsError with the text `hint`."""
        return hub_errors(lambda said, _: WeightsError("push_to_hub", self.repo_id, said, hint))
