"""Models of sequences: recurrent, convolutional and state-space ones. Sentences are of 6 tokens among 20."""

import torch
import torch.nn.functional as F
from task import Task, adamw, both, classes, lengths, numbers, token_loss
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class LanguageModel(nn.Module):
    """Embedding and decoder share their weight."""

    def __init__(self, tokens=20, width=12):
        super().__init__()
        self.encoder = nn.Embedding(tokens, width)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.Linear(width, tokens)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, input):
        batch = input.size(0)
        weight = next(self.parameters())
        hidden = (weight.new_zeros(2, batch, 12), weight.new_zeros(2, batch, 12))
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, bidirectional=True, batch_first=True)
        self.hidden2tag = nn.Linear(16, 5)

    def forward(self, tokens):
        lstm_out, _ = self.lstm(self.embedding(tokens))
        return F.log_softmax(self.hidden2tag(lstm_out), dim=-1)


def tag_loss(output, target):
    return F.nll_loss(output.transpose(1, 2), target, ignore_index=0)


class Seq2Seq(nn.Module):
    """GRU encoder and decoder with attention; the decoder is a loop over the target's tokens."""

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.attn, self.v = nn.Linear(2 * width, width), nn.Linear(width, 1, bias=False)

        def forward(self, hidden, outputs):
            hidden = hidden.unsqueeze(1).repeat(1, outputs.shape[1], 1)
            energy = torch.tanh(self.attn(torch.cat((hidden, outputs), dim=2)))
            return F.softmax(self.v(energy).squeeze(2), dim=1)

    def __init__(self, width=8):
        super().__init__()
        self.source, self.target = nn.Embedding(20, width), nn.Embedding(20, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge, self.keys = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.attention = self.Attention(width)
        self.decoder = nn.GRUCell(2 * width, width)
        self.out = nn.Linear(2 * width, 20)

    def forward(self, src, trg):
        outputs, hidden = self.encoder(self.source(src))
        hidden = torch.tanh(self.bridge(torch.cat((hidden[-2], hidden[-1]), dim=1)))
        keys = self.keys(outputs)
        predictions = torch.zeros(trg.shape[0], trg.shape[1], 20).to(src.device)
        for t in range(trg.shape[1]):
            a = self.attention(hidden, keys).unsqueeze(1)
            context = torch.bmm(a, keys).squeeze(1)
            hidden = self.decoder(torch.cat((self.target(trg[:, t]), context), 1), hidden)
            predictions[:, t] = self.out(torch.cat((hidden, context), 1))
        return predictions


class Greedy(nn.Module):
    """Decoding that takes its own best token, except while it trains."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(20, width), nn.LSTM(width, width, batch_first=True)
        self.cell, self.out = nn.LSTMCell(width, width), nn.Linear(width, 20)

    def forward(self, src, trg):
        _, (h, c) = self.encoder(self.embedding(src))
        h, c = h.squeeze(0), c.squeeze(0)
        token, outputs = trg[:, 0], []
        for t in range(trg.shape[1]):
            h, c = self.cell(self.embedding(token), (h, c))
            logits = self.out(h)
            outputs.append(logits)
            token = trg[:, t] if self.training else logits.argmax(-1)
        return torch.stack(outputs, dim=1)


class Cells(nn.Module):
    """LSTM cells over time, two layers."""

    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

    def forward(self, input):
        outputs = []
        h_t = torch.zeros(input.size(0), 8, dtype=input.dtype)
        c_t, h_t2, c_t2 = torch.zeros_like(h_t), torch.zeros_like(h_t), torch.zeros_like(h_t)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(2):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


class Packed(nn.Module):
    """A classifier of sentences of different lengths."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=True)

        def forward(self, embedded, lengths):
            packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
            output, hidden = self.rnn(packed)
            output, _ = pad_packed_sequence(output, batch_first=True, total_length=embedded.size(1))
            return output, torch.cat((hidden[-2], hidden[-1]), dim=1)

    def __init__(self):
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(20, 8), self.Encoder()
        self.hidden, self.fc = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, text, lengths):
        output, hidden = self.encoder(self.embedding(text), lengths)
        return self.fc(F.relu(self.hidden(hidden + output.mean(1))))


class WaveNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.causal = nn.Conv1d(1, channels, 1)
        self.filters, self.gates = nn.ModuleList(), nn.ModuleList()
        self.residuals, self.skips = nn.ModuleList(), nn.ModuleList()
        self.dilations = [2**i for i in range(3)]
        for d in self.dilations:
            self.filters.append(nn.Conv1d(channels, channels, 2, dilation=d))
            self.gates.append(nn.Conv1d(channels, channels, 2, dilation=d))
            self.residuals.append(nn.Conv1d(channels, channels, 1))
            self.skips.append(nn.Conv1d(channels, channels, 1))
        self.end1, self.end2 = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, 8, 1)

    def forward(self, x):
        x, skip = self.causal(x), 0
        for d, f, g, r, s in zip(self.dilations, self.filters, self.gates, self.residuals, self.skips, strict=True):
            padded = F.pad(x, (d, 0))
            z = torch.tanh(f(padded)) * torch.sigmoid(g(padded))
            skip = s(z) + skip
            x = x + r(z)
        return self.end2(F.relu(self.end1(F.relu(skip))))


class TCN(nn.Module):
    """A temporal convolutional network with the weight_norm of old."""

    class Chomp(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size = size

        def forward(self, x):
            return x[:, :, : -self.size].contiguous()

    def _block(self, inputs, outputs, dilation):
        conv = torch.nn.utils.weight_norm(nn.Conv1d(inputs, outputs, 3, padding=2 * dilation, dilation=dilation))
        return nn.Sequential(conv, self.Chomp(2 * dilation), nn.ReLU())

    def __init__(self):
        super().__init__()
        self.block1, self.block2 = self._block(2, 8, 1), self._block(8, 8, 2)
        self.down, self.linear = nn.Conv1d(2, 8, 1), nn.Linear(8, 3)

    def forward(self, x):
        y = F.relu(self.block2(self.block1(x)) + self.down(x))
        return self.linear(y[:, :, -1])


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.convs = nn.ModuleList([nn.Conv2d(1, 4, (size, 8)) for size in (2, 3, 4)])
        self.fc = nn.Linear(12, 3)

    def forward(self, text):
        embedded = self.embedding(text).unsqueeze(1)
        conved = [F.relu(conv(embedded)).squeeze(3) for conv in self.convs]
        pooled = [F.max_pool1d(conv, conv.shape[2]).squeeze(2) for conv in conved]
        return self.fc(torch.cat(pooled, dim=1))


class Mamba(nn.Module):
    """A selective scan, as a loop over time."""

    class Block(nn.Module):
        def __init__(self, dim, state=4):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            self.in_proj = nn.Linear(dim, 2 * dim, bias=False)
            self.conv1d = nn.Conv1d(dim, dim, 3, groups=dim, padding=2)
            self.x_proj, self.dt_proj = nn.Linear(dim, 1 + 2 * state, bias=False), nn.Linear(1, dim)
            self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float().repeat(dim, 1)))
            self.D, self.out_proj = nn.Parameter(torch.ones(dim)), nn.Linear(dim, dim, bias=False)
            self.state = state

        def selective_scan(self, u, delta, A, B, C):
            (b, length, d), n = u.shape, A.shape[1]
            deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
            deltaBu = torch.einsum("bld,bln,bld->bldn", delta, B, u)
            x, ys = torch.zeros((b, d, n), device=u.device), []
            for i in range(length):
                x = deltaA[:, i] * x + deltaBu[:, i]
                ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :]))
            return torch.stack(ys, dim=1) + u * self.D

        def forward(self, inputs):
            length = inputs.shape[1]
            x, res = self.in_proj(self.norm(inputs)).chunk(2, dim=-1)
            x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2))
            delta, B, C = self.x_proj(x).split([1, self.state, self.state], dim=-1)
            y = self.selective_scan(x, F.softplus(self.dt_proj(delta)), -torch.exp(self.A_log.float()), B, C)
            return inputs + self.out_proj(y * F.silu(res))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([self.Block(8)])
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class SpeechModel(nn.Module):
    """For the CTC loss: log-probabilities, time first."""

    def __init__(self):
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(4, 8, 3, padding=1), nn.GRU(8, 8, bidirectional=True)
        self.fc = nn.Linear(16, 6)

    def forward(self, x):
        x, _ = self.rnn(F.gelu(self.conv(x)).permute(2, 0, 1))
        return self.fc(x).log_softmax(-1)


def ctc_loss(output, target):
    tokens, length = target
    input_lengths = torch.full((output.size(1),), output.size(0), dtype=torch.long)
    return F.ctc_loss(output, tokens + 1, input_lengths, length, zero_infinity=True)


class CharCNN(nn.Module):
    """Character convolutions and highway layers."""

    class Highway(nn.Module):
        def __init__(self, size, layers=2):
            super().__init__()
            self.nonlinear = nn.ModuleList([nn.Linear(size, size) for _ in range(layers)])
            self.gate = nn.ModuleList([nn.Linear(size, size) for _ in range(layers)])
            for gate in self.gate:
                gate.bias.data.fill_(-2.0)

        def forward(self, x):
            for layer, g in zip(self.nonlinear, self.gate, strict=True):
                gate = torch.sigmoid(g(x))
                x = gate * F.relu(layer(x)) + (1 - gate) * x
            return x

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(20, 6), nn.Conv1d(6, 8, 3)
        self.highway, self.fc = self.Highway(8), nn.Linear(8, 3)

    def forward(self, characters):
        x = self.conv(self.embed(characters).transpose(1, 2)).max(dim=-1)[0]
        return self.fc(self.highway(x))


class ConvLSTM(nn.Module):
    """Of video, (batch, time, channels, height, width)."""

    class Cell(nn.Module):
        def __init__(self, channels, hidden):
            super().__init__()
            self.hidden, self.conv = hidden, nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)

        def forward(self, x, state):
            h, c = state
            i, f, o, g = torch.split(self.conv(torch.cat([x, h], dim=1)), self.hidden, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c

        def init_hidden(self, batch, size):
            zeros = torch.zeros(batch, self.hidden, *size, device=self.conv.weight.device)
            return zeros, zeros.clone()

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([self.Cell(1, 4), self.Cell(4, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        b, seq_len, _, h, w = x.size()
        layer_input = x
        for cell in self.cells:
            state, outputs = cell.init_hidden(b, (h, w)), []
            for t in range(seq_len):
                state = cell(layer_input[:, t], state)
                outputs.append(state[0])
            layer_input = torch.stack(outputs, dim=1)
        return self.out(layer_input[:, -1])


class LongConv(nn.Module):
    """A state-space layer by FFT, with complex parameters viewed as real ones."""

    def __init__(self, width=4, state=4, length=16):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(1, width), nn.Linear(width, 1)
        self.log_dt = nn.Parameter(torch.rand(width))
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(width, state)))
        self.A_imag = nn.Parameter(torch.pi * torch.arange(state).repeat(width, 1).float())
        self.C = nn.Parameter(torch.view_as_real(torch.randn(width, state, dtype=torch.cfloat)))
        self.D = nn.Parameter(torch.randn(width))
        self.length = length

    def kernel(self):
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dtA = A * torch.exp(self.log_dt).unsqueeze(-1)
        K = dtA.unsqueeze(-1) * torch.arange(self.length)
        C = torch.view_as_complex(self.C) * (torch.exp(dtA) - 1.0) / A
        return 2 * torch.einsum("hn,hnl->hl", C, torch.exp(K)).real

    def forward(self, u):
        u = self.encoder(u.unsqueeze(-1)).transpose(1, 2)
        k_f, u_f = torch.fft.rfft(self.kernel(), n=2 * self.length), torch.fft.rfft(u, n=2 * self.length)
        y = torch.fft.irfft(u_f * k_f, n=2 * self.length)[..., : self.length] + u * self.D.unsqueeze(-1)
        return self.decoder(F.gelu(y).transpose(1, 2)).squeeze(-1)


class Spectrogram(nn.Module):
    """A spectrogram by stft, and convolutions on it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, wave):
        spectrum = torch.stft(wave, 16, 8, window=self.window, return_complex=True)
        x = torch.log1p(spectrum.abs().pow(2)).unsqueeze(1)
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


class Retention(nn.Module):
    """Linear attention with decay, by a cumulative sum, and RWKV's shift of time."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, width), nn.Linear(width, 20)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mix = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x * self.mix + self.time_shift(x) * (1 - self.mix)
        q, k, v = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1, self.v(x)
        kv = torch.einsum("btd,bte->btde", k, v).cumsum(dim=1)
        out = torch.einsum("btd,btde->bte", q, kv) / (q * k.cumsum(dim=1)).sum(-1, keepdim=True)
        return self.head(out)


TOKENS, SHORT, CLASS = classes(20, 6), classes(20, 3), classes(3)
MODELS = {
    "lstm_language_model": Task(LanguageModel, TOKENS, TOKENS, token_loss),
    "tagger": Task(Tagger, TOKENS, classes(5, 6), tag_loss),
    "seq2seq_attention": Task(Seq2Seq, both(TOKENS, SHORT), SHORT, token_loss),
    "greedy_decoder": Task(Greedy, both(TOKENS, SHORT), SHORT, token_loss),
    "lstm_cells": Task(Cells, numbers(3), numbers(5), F.mse_loss),
    "packed_sequences": Task(Packed, both(TOKENS, lengths(6)), CLASS),
    "wavenet": Task(WaveNet, numbers(1, 16), classes(8, 16)),
    "tcn": Task(TCN, numbers(2, 12), CLASS),
    "text_cnn": Task(TextCNN, TOKENS, CLASS),
    "mamba": Task(Mamba, SHORT, SHORT, token_loss, adamw),
    "ctc_speech": Task(SpeechModel, numbers(4, 12), both(classes(5, 4), lengths(4)), ctc_loss),
    "char_cnn_highway": Task(CharCNN, TOKENS, CLASS),
    "conv_lstm": Task(ConvLSTM, numbers(2, 1, 6, 6), numbers(1, 6, 6), F.mse_loss),
    "long_convolution": Task(LongConv, numbers(16), numbers(16), F.smooth_l1_loss),
    "spectrogram": Task(Spectrogram, numbers(64), CLASS),
    "retention": Task(Retention, TOKENS, TOKENS, token_loss),
}
