"""Heads of `transformers` models by the ending of the class name, with the labels and the loss of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# meaning of a label's numbers
TOKEN = "an id of the vocabulary for each position"
TAG = "a class for each position"
FLAG = "0 or 1 for each position, padding too"
CLASS = "a class for each row"
PAIR = "0 or 1 for each row"
CHOICE = "one of its choices for each row"
PLACE = "a position for each row"


@dataclass(frozen=True)
class Head:
    """Labels and loss of one kind of model head, which the class name tells.

    Attributes:
        ending: ending of the names of the model classes with this head, e.g. "ForMaskedLM".
        labels: argument of the forward that takes labels --> text such as "a class for each row".
        shifts: True if the loss compares the output at a position with the label of the next position.
        takes_choices: True if token ids have the shape [rows, choices, tokens].
        over_real_tokens: True if the loss is a mean over all tokens that are not padding.
        ignores_padding: True if the loss reads a position only where the label is not -100.
    """

    ending: str
    labels: Mapping[str, str] = field(default_factory=dict)
    shifts: bool = False
    takes_choices: bool = False
    over_real_tokens: bool = False
    ignores_padding: bool = False

    @property
    def by_token(self) -> bool:
        """Return whether the head's loss is a mean over tokens, each term of which reads the output at one token."""
        kinds = set(self.labels.values())
        return bool(kinds) and kinds <= {TOKEN, TAG} and not self.takes_choices


HEADS = (
    Head("BertForPreTraining", {"labels": TOKEN, "next_sentence_label": PAIR}),
    Head("AlbertForPreTraining", {"labels": TOKEN, "sentence_order_label": PAIR}),
    Head("ElectraForPreTraining", {"labels": FLAG}, over_real_tokens=True),
    Head("DoubleHeadsModel", {"mc_labels": CHOICE, "labels": TOKEN}, shifts=True, takes_choices=True),
    Head("LMHeadModel", {"labels": TOKEN}, shifts=True),
    Head("BartForCausalLM", {"labels": TOKEN}),
    Head("WhisperForCausalLM", {"labels": TOKEN}),
    Head("ForCausalLM", {"labels": TOKEN}, shifts=True),
    Head("ForMaskedLM", {"labels": TOKEN}, ignores_padding=True),
    Head("ForConditionalGeneration", {"labels": TOKEN}),
    Head("ForTokenClassification", {"labels": TAG}, ignores_padding=True),
    Head("Classification", {"labels": CLASS}),
    Head("ForQuestionAnswering", {"start_positions": PLACE, "end_positions": PLACE}),
    Head("ForMultipleChoice", {"labels": CHOICE}, takes_choices=True),
    Head("ForNextSentencePrediction", {"next_sentence_label": PAIR}),
)  # fmt: skip
SHIFTED = "ForCausalLM"  # name used for a user's class that shifts its labels
UNKNOWN = Head("")


def head_of(class_name: str) -> Head:
    """Return the first head of HEADS whose `ending` fits a model's class name; if none fits, a head without labels."""
    return next((head for head in HEADS if class_name.endswith(head.ending)), UNKNOWN)
