"""GNMT (Wu et al., 2016) as PipeDream trained it: 193,765,952 parameters in 8 LSTM layers, 277,717,568 in 16.

Half of the layers encode, the first of them in both directions, and half decode. The attention (Bahdanau et al., 2015)
looks from the first layer of the decoder at the encoder's output; what it finds goes to all layers above.

The data are generated, by num2words: numbers below ten thousand in English and German words, for want of WMT16. At mini
size 97 % of the sentences are right after 2 epochs of 3 s, in one process of one thread with minibatches of 32:
`pdtool run plans/gnmt-1.yaml --target 'exact>=0.95'`.
"""

import re
from functools import cache

import torch
import torch.nn.functional as F
from num2words import num2words
from torch import nn

PAD = 0
LENGTHS = {"paper": (48, 47), "mini": (7, 9)}  # of an English and of a German sentence, in words
VOCABULARY = {"paper": 32_320, "mini": 32}  # of each language


class Encoder(nn.Module):
    """English (batch, length) to one vector for each word (batch, length, width)."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.both_ways = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.layers = nn.ModuleList(
            nn.LSTM(width if i else 2 * width, width, batch_first=True) for i in range(layers - 1)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, _ = self.both_ways(self.embedding(words))
        for i, layer in enumerate(self.layers):
            y, _ = layer(self.dropout(x))
            x = x + y if i else y
        return x


class Attention(nn.Module):
    """What each query (batch, queries, width) finds among the keys (batch, keys, width): (batch, queries, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        sums = self.query(queries).unsqueeze(2) + self.key(keys).unsqueeze(1)
        scores = self.score(torch.tanh(sums)).squeeze(3)
        return scores.masked_fill(is_padding.unsqueeze(1), -torch.inf).softmax(2) @ keys


class Decoder(nn.Module):
    """German (batch, length), each word given those before, to the scores of the next (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = Attention(width)
        self.layers = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor, encoded: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(self.embedding(words))
        context = self.attention(x, encoded, is_padding)
        for i, layer in enumerate(self.layers):
            y, _ = layer(torch.cat((self.dropout(x), context), 2))
            x = x + y if i else y
        return self.classifier(x)


class GNMT(nn.Module):
    """An English and the German sentence, each (batch, length), to the scores of each next German word."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary, width, layers // 2, dropout)
        self.decoder = Decoder(vocabulary, width, layers // 2, dropout)

    def forward(self, english: torch.Tensor, german: torch.Tensor) -> torch.Tensor:
        return self.decoder(german, self.encoder(english), english == PAD)


def model(size: str = "paper", layers: int = 8) -> nn.Module:
    """GNMT-8, or GNMT-16 with `layers=16`; "mini" is 64 wide instead of 1024."""
    if size == "paper":
        return GNMT(VOCABULARY[size], width=1024, layers=layers, dropout=0.2)
    if size == "mini":
        return GNMT(VOCABULARY[size], width=64, layers=layers, dropout=0.0)
    raise ValueError(f"size {size!r} is neither paper nor mini")


def example_inputs(batch_size: int, size: str = "paper") -> tuple[torch.Tensor, torch.Tensor]:
    """Random words, no padding among them."""
    english, german = (torch.randint(1, VOCABULARY[size], (batch_size, length)) for length in LENGTHS[size])
    return english, german


@cache
def _sentences() -> tuple[list[list[str]], list[list[str]]]:
    """5000 numbers in English, `forty two`, and in the pieces of German, `<begin> zwei und vier zig <end>`."""
    numbers = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:5000].tolist()
    english = [re.findall("[a-z]+", num2words(number, lang="en")) for number in numbers]
    german = [re.split("(hundert|tausend|und|zehn|zig|ßig)", num2words(number, lang="de")) for number in numbers]
    return english, [["<begin>", *filter(None, pieces), "<end>"] for pieces in german]


def _numbered(sentences: list[list[str]], length: int) -> torch.Tensor:
    """Sentences as the numbers of their words, (sentences, length), padded."""
    known = {word: i for i, word in enumerate(sorted({word for words in sentences for word in words}), start=PAD + 1)}
    rows = [[known[word] for word in words] for words in sentences]
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


def dataset(split: str, size: str = "paper") -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """((English, German), German one word ahead): 4000 pairs to train on and 1000 to validate with."""
    english, german = _sentences()
    english_length, german_length = LENGTHS[size]
    rows = zip(_numbered(english, english_length), _numbered(german, german_length + 1), strict=True)
    pairs = [((source, words[:-1]), words[1:]) for source, words in rows]
    return pairs[1000:] if split == "train" else pairs[:1000]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per word, in nats, of each sentence; their mean."""
    words = (target != PAD).sum(1)
    nats = F.cross_entropy(output.transpose(1, 2), target, ignore_index=PAD, reduction="none").sum(1)
    return (nats / words).mean()


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=2e-3)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Share of words, and of whole sentences, that are right given the words before.

    A sentence whose every word is right then is what greedy decoding gives: the words before are its own.
    """
    is_word = target != PAD
    right = (output.argmax(2) == target) & is_word
    exact = (right == is_word).all(1)
    return {"accuracy": (right.sum().item(), is_word.sum().item()), "exact": (exact.sum().item(), len(exact))}
