"""Transformers. Sentences are of 6 tokens among 20."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from task import Task, adamw, both, classes, in_double, named, numbers, token_loss
from torch import nn
from torch.utils.checkpoint import checkpoint


class GPT(nn.Module):
    """After nanoGPT: a causal mask in a buffer, tied weights, scaled initial values."""

    class Attention(nn.Module):
        def __init__(self, width, heads, length):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.n_head, self.n_embd = heads, width
            mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
            self.register_buffer("bias", mask, persistent=False)

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = (F.softmax(att, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, C)
            return self.c_proj(y)

    class Block(nn.Module):
        def __init__(self, width, heads, length):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn = GPT.Attention(width, heads, length)
            self.mlp = nn.ModuleDict(
                dict(c_fc=nn.Linear(width, 4 * width), act=nn.GELU("tanh"), c_proj=nn.Linear(4 * width, width))
            )

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            m = self.mlp
            return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))

    def __init__(self, width=8, layers=2, length=8):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(20, width),
                wpe=nn.Embedding(length, width),
                h=nn.ModuleList([self.Block(width, 2, length) for _ in range(layers)]),
                ln_f=nn.LayerNorm(width),
            )
        )
        self.lm_head = nn.Linear(width, 20, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx):
        _, t = idx.size()
        assert t <= self.transformer.wpe.num_embeddings, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class CheckpointedGPT(GPT):
    """With torch.utils.checkpoint in training, as its documentation writes it."""

    use_reentrant = False

    def forward(self, idx):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class ReentrantGPT(CheckpointedGPT):
    use_reentrant = True


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x, freqs_cis):
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, x_.shape[1], 1, x_.shape[-1])
    return torch.view_as_real(x_ * freqs_cis).flatten(3).type_as(x)


class Llama(nn.Module):
    """After Meta's code: rotary embeddings as complex numbers, grouped queries, SwiGLU."""

    class Block(nn.Module):
        def __init__(self, dim, heads, kv_heads):
            super().__init__()
            self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
            self.wq = nn.Linear(dim, dim, bias=False)
            self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
            self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
            self.wo = nn.Linear(dim, dim, bias=False)
            self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
            self.w2 = nn.Linear(2 * dim, dim, bias=False)
            self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

        def attention(self, x, freqs_cis, mask):
            b, s, _ = x.shape
            xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
            xq = apply_rotary_emb(xq.view(b, s, self.heads, self.head_dim), freqs_cis).transpose(1, 2)
            xk = apply_rotary_emb(xk.view(b, s, self.kv_heads, self.head_dim), freqs_cis)
            xv = xv.view(b, s, self.kv_heads, self.head_dim)
            groups = self.heads // self.kv_heads
            xk, xv = (torch.repeat_interleave(t, groups, dim=2).transpose(1, 2) for t in (xk, xv))
            scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
            out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(xq), xv)
            return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))

        def forward(self, x, freqs_cis, mask):
            h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
            y = self.ffn_norm(h)
            return h + self.w2(F.silu(self.w1(y)) * self.w3(y))

    def __init__(self, dim=16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(20, dim)
        self.layers = nn.ModuleList(self.Block(dim, 4, 2) for _ in range(2))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, 20, bias=False)
        self.freqs_cis = precompute_freqs_cis(dim // 4, 16)

    def forward(self, tokens):
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis.to(h.device)[:seqlen]
        mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
        mask = torch.triu(mask, diagonal=1)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h)).float()


class RotaryEmbedding(nn.Module):
    """Cosines and sines made at the first forward, and kept for as long as sentences are no longer."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))
        self.seq_len_cached = None
        self.cos_cached = self.sin_cached = None

    def forward(self, x):
        if self.seq_len_cached is None or x.shape[-2] > self.seq_len_cached:
            self.seq_len_cached = x.shape[-2]
            t = torch.arange(x.shape[-2], device=x.device).type_as(self.inv_freq)
            freqs = torch.einsum("i,j->ij", t, self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1)
            self.cos_cached, self.sin_cached = emb.cos()[None, None], emb.sin()[None, None]
        return self.cos_cached, self.sin_cached


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class NeoX(nn.Module):
    """Rotary embeddings with rotate_half, attention and MLP in parallel, sdpa with grouped queries."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.q, self.kv = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
            self.rotary, self.dense = RotaryEmbedding(4), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x):
            y = self.norm(x)
            q = self.q(y).unflatten(-1, (-1, 4)).transpose(1, 2)
            k, v = self.kv(y).unflatten(-1, (2, -1, 4)).permute(2, 0, 3, 1, 4)
            cos, sin = self.rotary(q)
            q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return x + self.dense(out.transpose(1, 2).flatten(2)) + self.mlp(y)

    def __init__(self, width=16):
        super().__init__()
        self.embed_in, self.embed_out = nn.Embedding(20, width), nn.Linear(width, 20, bias=False)
        self.layers = nn.Sequential(self.Block(width), self.Block(width))

    def forward(self, input_ids):
        return self.embed_out(self.layers(self.embed_in(input_ids)))


class ALiBi(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.embed, self.qkv = nn.Embedding(20, width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 20)
        slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])
        self.register_buffer("slopes", slopes.view(-1, 1, 1))

    def forward(self, tokens):
        x = self.embed(tokens)
        b, t, c = x.shape
        q, k, v = rearrange(self.qkv(x), self.heads)
        distance = torch.arange(t)[None, :] - torch.arange(t)[:, None]
        bias = (self.slopes * distance).masked_fill(distance > 0, float("-inf"))
        scores = q @ k.mT / math.sqrt(c // self.heads) + bias
        return self.head(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)))


def rearrange(qkv, heads):
    """(batch, time, 3 · width) to queries, keys and values, (batch, heads, time, width / heads) each."""
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)


class T5(nn.Module):
    """Encoder and decoder with a bias of relative positions in buckets, shared by the layers."""

    class Attention(nn.Module):
        def __init__(self, width, has_bias):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            if has_bias:
                self.relative_attention_bias = nn.Embedding(8, 2)

        @staticmethod
        def bucket(relative_position, num_buckets=8, max_distance=16):
            n = -torch.min(relative_position, torch.zeros_like(relative_position))
            max_exact = num_buckets // 2
            large = max_exact + (
                torch.log(n.float() / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
            ).to(torch.long)
            large = torch.min(large, torch.full_like(large, num_buckets - 1))
            return torch.where(n < max_exact, n, large)

        def compute_bias(self, length):
            context, memory = torch.arange(length)[:, None], torch.arange(length)[None, :]
            return self.relative_attention_bias(self.bucket(memory - context)).permute([2, 0, 1]).unsqueeze(0)

        def forward(self, x, memory=None, mask=None, position_bias=None):
            memory = x if memory is None else memory
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(x), self.k(memory), self.v(memory)))
            scores = torch.matmul(q, k.transpose(3, 2))
            if position_bias is None:
                if hasattr(self, "relative_attention_bias"):
                    position_bias = self.compute_bias(x.shape[1])
                else:
                    position_bias = torch.zeros((1, 2, x.shape[1], memory.shape[1]))
                if mask is not None:
                    position_bias = position_bias + mask
            scores += position_bias
            weights = F.softmax(scores.float(), dim=-1).type_as(scores)
            return self.o((weights @ v).transpose(1, 2).flatten(2)), position_bias

    def __init__(self, width=8, layers=1):
        super().__init__()
        self.shared, self.lm_head = nn.Embedding(20, width), nn.Linear(width, 20, bias=False)
        self.encoder = nn.ModuleList([self.Attention(width, i == 0) for i in range(layers)])
        self.decoder = nn.ModuleList([self.Attention(width, i == 0) for i in range(layers)])
        self.cross = nn.ModuleList([self.Attention(width, False) for _ in range(layers)])
        self.norms = nn.ModuleList([RMSNorm(width) for _ in range(2)])

    def forward(self, input_ids, decoder_input_ids):
        x, bias = self.shared(input_ids), None
        for layer in self.encoder:
            y, bias = layer(x, position_bias=bias)
            x = x + y
        memory = self.norms[0](x)
        y, bias = self.shared(decoder_input_ids), None
        t = y.shape[1]
        mask = (1.0 - torch.tril(torch.ones(t, t))) * -1e9
        for layer, cross in zip(self.decoder, self.cross, strict=True):
            z, bias = layer(y, mask=mask, position_bias=bias)
            y = y + z
            y = y + cross(y, memory)[0]
        return self.lm_head(self.norms[1](y) * y.shape[-1] ** -0.5)


class PositionalEncoding(nn.Module):
    """After PyTorch's tutorial."""

    def __init__(self, d_model, dropout=0.0, max_len=16):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[: x.size(0)]
        return self.dropout(x)


class TransformerLM(nn.Module):
    """PyTorch's tutorial on language models, time first inside."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.pos_encoder = PositionalEncoding(8, dropout)
        layers = nn.TransformerEncoderLayer(8, 2, 16, dropout)
        self.transformer_encoder = nn.TransformerEncoder(layers, 2)
        self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, src, src_mask=None):
        src = self.embedding(src.t()) * math.sqrt(8)
        src = self.pos_encoder(src)
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(len(src)).to(src.device)
        return self.linear(self.transformer_encoder(src, src_mask)).transpose(0, 1)


def transformer_lm_with_dropout():
    return TransformerLM(0.1)


class Translation(nn.Module):
    """PyTorch's tutorial on translation: nn.Transformer with masks of the future and of padding."""

    def __init__(self, width=8):
        super().__init__()
        self.transformer = nn.Transformer(width, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(width, 20)
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(20, width), nn.Embedding(20, width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src, tgt):
        src_mask = torch.zeros((src.shape[1], src.shape[1])).type(torch.bool)
        tgt_mask = (torch.triu(torch.ones((tgt.shape[1], tgt.shape[1]))) == 1).transpose(0, 1)
        tgt_mask = tgt_mask.float().masked_fill(tgt_mask == 0, float("-inf")).masked_fill(tgt_mask == 1, float(0.0))
        src_padding_mask, tgt_padding_mask = src == 19, tgt == 19
        src_emb, tgt_emb = self.src_tok_emb(src.long()), self.tgt_tok_emb(tgt.long())
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, src_padding_mask
        )
        return self.generator(outs)


@dataclass
class BertOutput:
    """As Hugging Face's outputs are: a dataclass of tensors and None."""

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: torch.Tensor | None = None


class Bert(nn.Module):
    """Called with a dict of inputs; some arguments are never given."""

    def __init__(self, width=8):
        super().__init__()
        self.word_embeddings = nn.Embedding(20, width, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = nn.Embedding(8, width), nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(8).expand((1, -1)), persistent=False)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.decoder = nn.Linear(width, 20)
        self.decoder.weight = self.word_embeddings.weight

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, return_dict=True):
        if position_ids is None:
            position_ids = self.position_ids[:, : input_ids.size(1)]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        x = self.LayerNorm(x + self.token_type_embeddings(token_type_ids))
        mask = None if attention_mask is None else attention_mask == 0
        y, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
        logits = self.decoder(x + y)
        return BertOutput(logits) if return_dict else (logits,)


def bert_loss(output, target):
    return token_loss(output.logits, target)


class Albert(nn.Module):
    """One layer, applied four times; a factorised embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mapping = nn.Embedding(20, 4), nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.mapping(self.embedding(tokens))
        for _ in range(4):
            x = self.layer(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class DenseExperts(nn.Module):
    """Every expert sees every token; the gate weighs their answers."""

    def __init__(self, width=8, experts=4):
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(20, width), nn.Linear(width, experts), nn.Linear(width, 20)
        self.w1 = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.1)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)

    def forward(self, tokens):
        x = self.embed(tokens)
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        gates = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.w1))
        return self.head(x + torch.einsum("bteh,ehd,bte->btd", hidden, self.w2, gates))


class SparseExperts(nn.Module):
    """Every expert sees the tokens that chose it: a loop over data."""

    class Experts(nn.Module):
        def __init__(self, width, experts):
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.experts = nn.ModuleList()
            for _ in range(experts):
                self.experts.append(nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, width)))

        def forward(self, x):
            inputs_squashed = x.view(-1, x.shape[-1])
            weights, selected = torch.topk(self.gate(inputs_squashed), 2)
            weights = F.softmax(weights, dim=1, dtype=torch.float).type_as(x)
            results = torch.zeros_like(inputs_squashed)
            for i, expert in enumerate(self.experts):
                batch_idx, nth_expert = torch.where(selected == i)
                if batch_idx.numel() > 0:
                    results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(inputs_squashed[batch_idx])
            return results.view_as(x)

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, width), nn.LayerNorm(width)
        self.moe, self.head = self.Experts(width, 4), nn.Linear(width, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.moe(self.norm(x)))


class SwitchTransformer(DenseExperts):
    """With a loss that balances the load, which the model returns beside its answer."""

    def forward(self, tokens):
        x = self.embed(tokens)
        probabilities = self.gate(x).softmax(-1)
        best = probabilities.max(-1)
        one_hot = F.one_hot(best.indices, 4).float()
        balance = 4 * (one_hot.mean((0, 1)) * probabilities.mean((0, 1))).sum()
        hidden = F.relu(torch.einsum("btd,edh->bteh", x, self.w1))
        y = torch.einsum("bteh,ehd,bte->btd", hidden, self.w2, one_hot * best.values.unsqueeze(-1))
        return self.head(x + y), balance


def balanced_loss(output, target):
    return token_loss(output[0], target) + 0.01 * output[1]


class Perceiver(nn.Module):
    """Latents attend to the inputs."""

    def __init__(self, width=8):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, width))
        self.proj, self.head = nn.Linear(3, width), nn.Linear(width, 3)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)
        self.self_attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        data = self.proj(x)
        z = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
        z = z + self.cross(z, data, data)[0]
        z = z + self.self_attention(z, z, z, need_weights=False)[0]
        return self.head(z.mean(1))


class LocalAttention(nn.Module):
    """Attention to a window around each token, by unfold, and keys of lower rank (Linformer)."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(20, width), nn.Linear(width, 3 * width)
        self.E, self.head = nn.Parameter(torch.randn(3, 6) * 0.1), nn.Linear(width, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        keys, values = (F.pad(t, (0, 0, 1, 1)).unfold(1, 3, 1) for t in (k, v))
        local = torch.einsum("btd,btdw->btw", q, keys).softmax(-1)
        low = (q @ (self.E @ k).mT).softmax(-1) @ (self.E @ v)
        return self.head(x + torch.einsum("btw,btdw->btd", local, values) + low)


class MusicTransformer(nn.Module):
    """Relative positions by skewing."""

    def __init__(self, width=8, length=6):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(20, width), nn.Linear(width, 3 * width), nn.Linear(width, 20)
        self.Er = nn.Parameter(torch.randn(length, width) * 0.1)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool())

    def forward(self, tokens):
        x = self.embed(tokens)
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, -1)
        qe = torch.matmul(q, self.Er.transpose(0, 1))
        skewed = F.pad(qe, (1, 0)).reshape(b, t + 1, t)[:, 1:, :]
        scores = (q @ k.transpose(-1, -2) + skewed) / c**0.5
        scores = scores.masked_fill(~self.mask[:t, :t], torch.finfo(scores.dtype).min)
        return self.head(scores.softmax(-1) @ v)


def padded(generator):
    """A sentence of 3 to 6 tokens, and the token 19 after its end."""
    tokens = torch.randint(0, 19, (6,), generator=generator)
    length = torch.randint(3, 7, (), generator=generator)
    return torch.where(torch.arange(6) < length, tokens, 19)


def translation_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=19)


TOKENS, CLASS = classes(20, 6), classes(3)
BERT = named(input_ids=TOKENS, attention_mask=lambda g: (torch.arange(6) < torch.randint(2, 7, (), generator=g)).long())
MODELS = {
    "gpt": Task(GPT, TOKENS, TOKENS, token_loss, adamw),
    "checkpointed": Task(CheckpointedGPT, TOKENS, TOKENS, token_loss),
    "checkpointed_reentrant": Task(ReentrantGPT, TOKENS, TOKENS, token_loss),
    "llama": Task(Llama, TOKENS, TOKENS, token_loss, adamw),
    "neox": Task(NeoX, TOKENS, TOKENS, token_loss),
    "alibi": Task(ALiBi, TOKENS, TOKENS, token_loss),
    "t5": Task(T5, both(TOKENS, TOKENS), TOKENS, token_loss),
    "transformer_lm": Task(TransformerLM, TOKENS, TOKENS, token_loss),
    "transformer_lm_dropout": Task(transformer_lm_with_dropout, TOKENS, TOKENS, token_loss, noisy=True),
    "translation": Task(Translation, both(padded, padded), padded, translation_loss),
    "bert": Task(Bert, BERT, TOKENS, bert_loss),
    "albert": in_double(Task(Albert, TOKENS, CLASS)),
    "dense_experts": Task(DenseExperts, TOKENS, TOKENS, token_loss),
    "sparse_experts": Task(SparseExperts, TOKENS, TOKENS, token_loss),
    "switch_transformer": Task(SwitchTransformer, TOKENS, TOKENS, balanced_loss),
    "perceiver": Task(Perceiver, numbers(5, 3), CLASS),
    "local_attention": Task(LocalAttention, TOKENS, TOKENS, token_loss),
    "music_transformer": Task(MusicTransformer, TOKENS, TOKENS, token_loss),
}
