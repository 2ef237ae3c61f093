"""Preserve files that are not weights (tokenizer, README, subfolders) when a save replaces a folder."""

import contextlib
import os
import re
import shutil
from pathlib import Path

# Files that a save replaces: weights, and state that belongs to exactly these weights.
WEIGHT_FILE = re.compile(
    r"(model|pytorch_model|optimizer)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|(training_state|checksums)\.json"
)
ADAPTER_FILE = re.compile(r"adapter_model\.(safetensors|bin)")


# Files of a tokenizer or an image processor of transformers.
TOKENIZER_FILE = re.compile(
    r"(tokenizer|spiece|spm|sentencepiece|vocab|merges|bpe|dict|added_tokens|special_tokens_map|chat_template"
    r"|normalizer|source|target)[\w.-]*\.(json|txt|model|jinja|spm|codes)"
    r"|(video_)?(preprocessor|processor)_config\.json"
)


def carry_tokenizer(source: Path | None, target: Path, folder: Path) -> None:
    """Copy the tokenizer of the loaded checkpoint into a saved folder, so that the folder is complete.

    Args:
        source: folder that the model was loaded from; None or a missing folder copies nothing.
        target: folder that will be replaced; a tokenizer file that it has is kept instead of that of `source`.
        folder: temporary folder that will replace `target`.
    """
    if source is None or not source.is_dir():
        return
    for item in source.iterdir():
        is_new = not os.path.lexists(target / item.name)
        if TOKENIZER_FILE.fullmatch(item.name) and item.is_file() and is_new:
            shutil.copy2(item, folder / item.name)


def carry_over(old: Path, new: Path, replaced: re.Pattern[str] = WEIGHT_FILE) -> None:
    """Hard-link or copy all files of the folder `old` into `new`, except those whose names match `replaced`, and those
    of a name that `new` has.

    Hard links are used where the file system allows them: they are fast, and a log that another process is writing
    continues in the new folder.
    """
    for item in old.iterdir():
        if not replaced.fullmatch(item.name):
            _carry(item, new / item.name)


def _carry(item: Path, place: Path) -> None:
    if item.is_dir() and not item.is_symlink():
        if os.path.lexists(place) and not place.is_dir():
            return
        place.mkdir(exist_ok=True)
        for child in item.iterdir():
            _carry(child, place / child.name)
        shutil.copystat(item, place)
    elif not os.path.lexists(place):
        try:
            os.link(item, place, follow_symlinks=False)
        except OSError:
            with contextlib.suppress(shutil.SpecialFileError):  # sockets and pipes
                shutil.copy2(item, place, follow_symlinks=False)
