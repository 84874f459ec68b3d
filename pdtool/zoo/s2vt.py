"""S2VT (Venugopalan et al., 2015): two LSTMs that read the frames of a video and then write what happens in it.

The first LSTM goes over the frames; the second over what the first one makes of them and, when all are read, also over
the words of the caption.

The data are made here, for want of MSVD: scikit-learn's real handwritten digits move over a black square, one way and
then another, and a template captions them. A frame's pixels take the place of its VGG features. At mini size 92 % of
the captions are right after 10 epochs of 2 s, in one process of one thread with minibatches of 32:
`pdtool run plans/s2vt-1.yaml --target 'exact>=0.9'`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

FRAMES = {"paper": 60, "mini": 8}
PIXELS = {"paper": 64, "mini": 16}  # along a side of a frame: 64 × 64 are 4096, as many as VGG has features
LENGTH = {"paper": 20, "mini": 7}  # words of a caption
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ("<pad>", "<begin>", "<end>", "a", "moves", "then", "keeps", "moving", *DIGITS, *MOVES)
VOCABULARY = {"paper": 12_594, "mini": len(WORDS)}
PAD = 0


class S2VT(nn.Module):
    """Frames (batch, frames, features) and words (batch, length) to the scores of each next word."""

    def __init__(self, features: int, vocabulary: int, embedding: int, width: int, dropout: float) -> None:
        super().__init__()
        self.see = nn.Linear(features, embedding)
        self.first = nn.LSTM(embedding, width, batch_first=True)
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PAD)
        self.second = nn.LSTM(width + embedding, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, frames: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen, length = frames.shape[1], words.shape[1]
        watched, _ = self.first(F.pad(self.dropout(self.see(frames)), (0, 0, 0, length)))
        read = F.pad(self.dropout(self.embedding(words)), (0, 0, seen, 0))
        written, _ = self.second(torch.cat((watched, read), 2))
        return self.classifier(self.dropout(written[:, seen:]))


def model(size: str = "paper") -> nn.Module:
    """The paper's network, with the 12,594 words of MSVD; or "mini": LSTMs of 128 instead of 1000."""
    if size == "paper":
        return S2VT(PIXELS[size] ** 2, VOCABULARY[size], embedding=500, width=1000, dropout=0.5)
    if size == "mini":
        return S2VT(PIXELS[size] ** 2, VOCABULARY[size], embedding=64, width=128, dropout=0.0)
    raise ValueError(f"size {size!r} is neither paper nor mini")


def example_inputs(batch_size: int, size: str = "paper") -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and random words."""
    frames = torch.rand(batch_size, FRAMES[size], PIXELS[size] ** 2)
    return frames, torch.randint(1, VOCABULARY[size], (batch_size, LENGTH[size]))


class MovingDigits(Dataset[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]):
    """((frames, caption), caption one word ahead); each clip is made when it is asked for.

    Args:
        images: (clips, 8, 8), what moves.
        digits: (clips,), what they show.
        moves: (clips, 2), which of MOVES comes first, and which then.
        size: "paper" or "mini".
    """

    def __init__(self, images: torch.Tensor, digits: torch.Tensor, moves: torch.Tensor, size: str) -> None:
        self.images, self.digits, self.moves, self.size = images, digits, moves, size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        first, second = (list(MOVES)[move] for move in self.moves[index])
        caption = self.caption(DIGITS[self.digits[index]], first, second)
        return (self.frames(self.images[index], first, second), caption[:-1]), caption[1:]

    def frames(self, image: torch.Tensor, first: str, second: str) -> torch.Tensor:
        """A clip (frames, features): eight steps over a square of 16 × 16, whose borders meet, the turn after four."""
        picture = F.pad(image, (4, 4, 4, 4))
        steps = [t * 8 // FRAMES[self.size] for t in range(FRAMES[self.size])]
        shifts = [
            [min(step, 4) * a + max(step - 4, 0) * b for a, b in zip(MOVES[first], MOVES[second], strict=True)]
            for step in steps
        ]
        clip = torch.stack([picture.roll(shift, (0, 1)) for shift in shifts])
        return F.interpolate(clip.unsqueeze(1), size=PIXELS[self.size]).flatten(1)

    def caption(self, digit: str, first: str, second: str) -> torch.Tensor:
        """`a seven moves up then left`, as the numbers of its words, padded."""
        moves = f"keeps moving {first}" if first == second else f"moves {first} then {second}"
        words = [WORDS.index(word) for word in f"<begin> a {digit} {moves} <end>".split()]
        return F.pad(torch.tensor(words), (0, LENGTH[self.size] + 1 - len(words)), value=PAD)


def dataset(split: str, size: str = "paper") -> MovingDigits:
    """Clips of 1437 digits to train on and of 360 others to validate with, each digit in two clips."""
    from sklearn.datasets import load_digits  # here, for most workers read no data

    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    chosen = (order[360:] if split == "train" else order[:360]).repeat(2)
    images = torch.tensor(digits.images, dtype=torch.float32)[chosen] / 4
    moves = torch.randint(len(MOVES), (len(chosen), 2), generator=torch.Generator().manual_seed(1))
    return MovingDigits(images, torch.tensor(digits.target)[chosen], moves, size)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per word, in nats, of each caption; their mean."""
    words = (target != PAD).sum(1)
    nats = F.cross_entropy(output.transpose(1, 2), target, ignore_index=PAD, reduction="none").sum(1)
    return (nats / words).mean()


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=3e-3)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Share of words, and of whole captions, that are right given the words before.

    A caption whose every word is right then is what greedy decoding gives: the words before are its own.
    """
    is_word = target != PAD
    right = (output.argmax(2) == target) & is_word
    exact = (right == is_word).all(1)
    return {"accuracy": (right.sum().item(), is_word.sum().item()), "exact": (exact.sum().item(), len(exact))}
