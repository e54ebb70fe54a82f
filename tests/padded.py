"""Encoders whose batches are padded, as people write them, and batches for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS, LONGEST = 32, 2, 50, 64


class PaddedEncoder(nn.Module):
    """Two layers; `attends` is how the mask is spelled, `pools` what is read of the result."""

    def __init__(
        self, attends: str = "bool", pools: str = "mean", *, layers: int = 2, width: int = WIDTH, heads: int = HEADS,
        longest: int = LONGEST,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attends, self.pools, self.heads = attends, pools, heads
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Parameter(torch.randn(1, longest, width))
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "up": nn.Linear(width, 2 * width),
                "down": nn.Linear(2 * width, width), "first": nn.LayerNorm(width), "second": nn.LayerNorm(width),
            }) for _ in range(layers)
        )  # fmt: skip
        self.head, self.score = nn.Linear(width, 5), nn.Linear(width, 1)
        self.far = nn.Embedding(2 * longest, heads)
        self.register_buffer("triangle", torch.ones(1, 1, longest, longest, dtype=torch.bool).tril(), persistent=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self._pool(self.layered(self.tokens(ids) + self.places[:, : ids.shape[1]], mask), mask)

    def layered(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What the layers make of rows."""
        batch, length, _ = x.shape
        for layer in self.layers:
            q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in layer["qkv"](x).chunk(3, -1))
            seen = self._attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, -1)
            x = layer["first"](x + layer["out"](seen))
            x = layer["second"](x + layer["down"](F.gelu(layer["up"](x))))
        return x

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keys = mask[:, None, None, :]
        match self.attends:
            case "bool":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=keys.bool())
            case "expanded":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=keys.bool().expand(-1, 1, q.shape[2], -1))
            case "lowest":
                hidden = (1.0 - keys.to(q.dtype)) * torch.finfo(q.dtype).min
                return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)
            case "indexed":  # as transformers builds it
                rows, keys_at = torch.arange(mask.shape[0]), torch.arange(mask.shape[1])
                hidden = mask.bool()[rows[:, None, None, None], keys_at[None, None, None, :]]
                return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden & (keys_at >= 0)[None, None, :, None])
            case "biased" | "biased, chosen":  # by how far a key is, as T5 does
                places = torch.arange(mask.shape[1])
                bias = self.far(places[None, :] - places[:, None] + self.places.shape[1]).permute(2, 0, 1)[None]
                if self.attends == "biased":
                    scores = q @ k.transpose(-1, -2) + (bias + (1.0 - keys.to(q.dtype)) * torch.finfo(q.dtype).min)
                    return scores.softmax(-1) @ v
                hidden = torch.where(keys.bool(), bias, torch.finfo(q.dtype).min)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, scale=1.0)
            case "biased, for each" | "biased behind":  # as MPNet does: for every sequence, and the mask by itself
                places = torch.arange(mask.shape[1])
                bias = self.far(places[None, :] - places[:, None] + self.places.shape[1]).permute(2, 0, 1)[None]
                bias = bias.expand(mask.shape[0], -1, -1, -1).contiguous()
                hidden = (1.0 - keys.to(q.dtype)) * torch.finfo(q.dtype).min
                added = (bias, hidden) if self.attends == "biased, for each" else (hidden, bias)
                scores = q @ k.transpose(-1, -2) / 4.0 + added[0] + added[1]
                return scores.softmax(-1) @ v
            case "causal" | "causal, grouped":  # as transformers builds it
                rows, places = torch.arange(mask.shape[0]), torch.arange(mask.shape[1])
                seen = places[None, None, None, :] <= places[None, None, :, None]
                seen = seen & mask.bool()[rows[:, None, None, None], places[None, None, None, :]]
                if self.attends == "causal":
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
                return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=seen, enable_gqa=True)
            case "causal, a triangle":
                ahead = torch.full((q.shape[2], q.shape[2]), -1e9, dtype=q.dtype).triu(1)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=ahead + (1.0 - keys.to(q.dtype)) * -1e9)
            case "causal, a buffer":
                seen = self.triangle[:, :, : q.shape[2], : q.shape[2]] & keys.bool()
                scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~seen, -torch.inf)
            case "before its place":  # not its own row: the first of each sequence sees nothing
                places = torch.arange(mask.shape[1])
                seen = (places[None, :] < places[:, None])[None, None] & keys.bool()
                return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            case "filled":
                scores = (q @ k.transpose(-1, -2) / 4).masked_fill(keys == 0, -torch.inf)
            case "filled, low":
                scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~keys.bool(), -1e9)
            case "chosen, low":
                scores = torch.where(keys > 0, q @ k.transpose(-1, -2) / 4, torch.finfo(q.dtype).min)
            case "chosen, a tensor":
                scores = torch.where(keys > 0, q @ k.transpose(-1, -2) / 4, torch.full([], -1e9, dtype=q.dtype))
            case "causal, repeated":  # as transformers spells it out for grouped heads
                places = torch.arange(mask.shape[1])
                seen = (places[None, None, None, :] <= places[None, None, :, None]) & keys.bool()
                hidden = torch.where(seen, torch.tensor(0.0, dtype=q.dtype), torch.finfo(q.dtype).min)
                k, v = (t[:, :1, None].expand(-1, 1, self.heads, -1, -1).reshape(q.shape) for t in (k, v))
                scores = (q @ k.transpose(-1, -2) / 4 + hidden).softmax(-1, dtype=q.dtype)
                return scores @ v
            case "heads in the batch":  # as torch.nn.MultiheadAttention does where weights are asked for
                flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
                hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask == 0, -torch.inf)
                hidden = hidden.view(mask.shape[0], 1, 1, -1).expand(-1, self.heads, -1, -1).reshape(-1, 1, mask.shape[1])
                weights = torch.baddbmm(hidden, flat[0] * 0.25, flat[1].transpose(-2, -1)).softmax(-1)
                return torch.bmm(weights, flat[2]).reshape(q.shape)
            case _:
                scores = q @ k.transpose(-1, -2) / 4 + (1.0 - keys.to(q.dtype)) * -10000.0
        return scores.softmax(-1) @ v

    def _pool(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = mask[..., None]
        match self.pools:
            case "mean":
                return self.head((x * rows).sum(1) / rows.sum(1))
            case "expanded mean":  # as sentence-transformers does it
                wide = mask.unsqueeze(-1).expand(x.size()).to(x.dtype)
                return (x * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
            case "first":
                return self.head(x[:, 0])
            case "last":
                return self.head(x[:, -1])
            case "counted":
                return self.head(x[torch.arange(x.shape[0]), mask.sum(1) - 1])
            case "told":  # as classifiers of transformers' decoders find the last token
                places = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
                return self.head(x)[torch.arange(x.shape[0], device=x.device), (places * mask.to(torch.int32)).argmax(-1)]
            case "gathered":
                at = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, x.shape[2])
                return self.head(x.gather(1, at).squeeze(1))
            case "a product":
                return torch.bmm(mask.to(x.dtype)[:, None], x)[:, 0] / rows.sum(1)
            case "a product, turned":
                return (x.transpose(1, 2) @ mask.to(x.dtype)[..., None])[..., 0] / rows.sum(1)
            case "an einsum":
                return torch.einsum("bsd,bs->bd", x, mask.to(x.dtype)) / rows.sum(1)
            case "largest":
                return x.masked_fill(rows == 0, -torch.inf).amax(1)
            case "largest, written":  # as sentence-transformers does it
                wide, x = mask.unsqueeze(-1).expand(x.size()).to(x.dtype), x.clone()
                x[wide == 0] = -1e9
                return x.max(1)[0]
            case "largest, rows written":
                x = x.clone()
                x[mask == 0] = -torch.inf
                return x.max(1)[0]
            case "weighed, low":
                weights = self.score(x).squeeze(-1).masked_fill(mask == 0, -1e9).softmax(1)
                return torch.einsum("bs,bsd->bd", weights, x)
            case "weighed, lowered":
                weights = (self.score(x) + ((1.0 - rows.to(x.dtype)) * -1e9)).softmax(1)
                return (x * weights).sum(1)
            case "lowered scores":  # dead rows' scores are a result as well
                scores = self.score(x) + ((1.0 - rows.to(x.dtype)) * -1e9)
                return torch.cat([(x * scores.softmax(1)).sum(1), scores.squeeze(-1)], 1)
            case "weighed":
                weights = self.score(x).squeeze(-1).masked_fill(mask == 0, -torch.inf).softmax(1)
                return (x * weights[..., None]).sum(1)
            case _:
                return x


class Answering(nn.Module):
    """A padded encoder, and a decoder of another length whose rows see the live rows of the encoder's."""

    def __init__(self, attends: str = "bool", asks: int = 4) -> None:
        super().__init__()
        self.encoder, self.attends, self.asks = PaddedEncoder(pools="nothing"), attends, asks
        self.tokens, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.library = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        x, y = self.encoder(ids, mask), self.tokens(asked)
        for _ in range(2):
            if self.attends == "library":  # heads and sequences share an axis
                seen = self.library(y, x, x, key_padding_mask=mask == 0)[0]
            else:
                shape = (len(ids), -1, HEADS, WIDTH // HEADS)
                q, k, v = (t.view(shape).transpose(1, 2) for t in (self.q(y), *self.kv(x).chunk(2, -1)))
                seen = self.out(self._attend(q, k, v, mask[:, None, None, :]).transpose(1, 2).reshape(y.shape))
            y = self.norm(y + seen)
        return y

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if self.attends == "spelled":
            return (q @ k.transpose(-1, -2) / 4 + (1.0 - keys.to(q.dtype)) * torch.finfo(q.dtype).min).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keys.bool())

    def batch(self, sequences: int, rows: int, share: float = 0.4) -> tuple[torch.Tensor, ...]:
        """A padded batch, and what is asked of each sequence; of varying length where the model's is 0."""
        asks = self.asks or 1 + rows // 3
        return *batch(sequences, rows, share), torch.randint(0, TOKENS, (sequences, asks))


class Compared(nn.Module):
    """Two padded batches, each with a mask of its own: questions and passages, say. The second's mask may be made by the model."""

    def __init__(self, *, inside: bool = False) -> None:
        super().__init__()
        self.asks, self.answers, self.inside = PaddedEncoder(layers=1), PaddedEncoder(layers=1), inside

    def forward(self, asked: torch.Tensor, asked_mask: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = (ids != 0).long() if self.inside else mask
        return self.asks(asked, asked_mask) * self.answers(ids, seen)

    def batch(self, sequences: int, rows: int, share: float = 0.4, ask_share: float | None = None) -> tuple[torch.Tensor, ...]:
        """Both; the first has half the rows, of which such a part is real."""
        ids, mask = batch(sequences, rows, share)
        return *batch(sequences, rows // 2, share if ask_share is None else ask_share), (1 + ids % (TOKENS - 1)) * mask, mask


class MaskedInside(nn.Module):
    """An encoder that makes its mask by itself: of token numbers, 0 being padding, or of lengths."""

    def __init__(self, made: str, pools: str = "mean") -> None:
        super().__init__()
        self.made, self.encoder = made, PaddedEncoder("filled" if made == "both" else "bool", pools)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        match self.made:
            case "not padding":
                return self.encoder(ids, (ids != 0).long())
            case "both":  # asked twice, and of two numbers
                return self.encoder(ids, ids.ne(0).long()) + (ids == 0).sum(1, keepdim=True)
            case "neither of two":
                return self.encoder(ids, ((ids != 0) & (ids != 1)).long())
            case "longer":
                assert lengths is not None
                return self.encoder(ids, (~(places[None] >= lengths[:, None])).long())
            case _:
                assert lengths is not None
                return self.encoder(ids, (places.expand(ids.shape) < lengths.unsqueeze(1)).long())

    def batch(self, sequences: int, rows: int, share: float = 0.4) -> tuple[torch.Tensor, ...]:
        """Token numbers of which such a part is real, or so many of each sequence as lengths say."""
        ids, mask = batch(sequences, rows, share)
        if self.made in ("not padding", "both", "neither of two"):
            return ((2 + ids % (TOKENS - 2)) * mask,)
        return ids, torch.randint(1, max(2, round(2 * share * rows)), (sequences,)).clamp(max=rows)


class Frames(nn.Module):
    """Features of frames and how many each sequence has, as models of sound are given them. The last frame is read, found by
    `gather`, or means and deviations of live ones; `styled`: they are shifted and scaled by what each sequence is said to be like.
    """

    def __init__(self, pools: str = "last", *, styled: bool = False) -> None:
        super().__init__()
        self.pools, self.styled = pools, styled
        self.inner, self.encoder = nn.Linear(WIDTH, WIDTH), PaddedEncoder(pools="nothing")
        self.styles, self.head = nn.Linear(4, 2 * WIDTH), nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        live, x = torch.arange(s) < lengths[:, None], self.inner(x)
        if self.styled:
            scale, shift = self.styles(style)[:, None].chunk(2, -1)
            x = x * (1 + scale) + shift.expand(b, s, -1)
        x = self.encoder.layered(x, live)
        if self.pools == "last":
            return x.gather(1, (lengths[:, None] - 1).clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))[:, 0]
        weights = live[..., None].to(x.dtype)
        mean = (x * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        apart = (((x - mean) * weights) ** 2).sum(1) / weights.sum(1)
        return self.head(torch.cat([mean.squeeze(1), (apart + 1e-5).sqrt()], 1))

    def batch(self, sequences: int, rows: int, share: float = 0.4) -> tuple[torch.Tensor, ...]:
        """Frames, of which such a part is real, or a little more."""
        lengths = torch.randint(1, max(2, round(2 * share * rows)), (sequences,)).clamp(max=rows)
        return torch.randn(sequences, rows, WIDTH), lengths, torch.randn(sequences, 4)


class AttendingEncoder(nn.Module):
    """torch's own attention as most people call it, which also makes its weights."""

    def __init__(self, pools: str = "mean") -> None:
        super().__init__()
        self.pools = pools
        self.attends = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        for attend in self.attends:
            x = self.norm(x + attend(x, x, x, key_padding_mask=padding)[0])
            x = x + F.relu(self.up(x))
        rows = (~padding)[..., None]
        return x[:, 0] if self.pools == "first" else (x * rows).sum(1) / rows.sum(1)


class LibraryEncoder(nn.Module):
    """torch's own layers, whose mask is true where a row is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        rows = (~padding)[..., None]
        return (self.encoder(x, src_key_padding_mask=padding) * rows).sum(1) / rows.sum(1)


class CausalScores(PaddedEncoder):
    """Scores with a number in the place of those of hidden keys, ahead of a query or dead; the last row is read."""

    def __init__(self, number: float) -> None:
        super().__init__(pools="last")
        self.number = number

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, None, :].bool()
        hidden = torch.zeros(seen.shape).masked_fill(~seen, self.number)
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + hidden).softmax(-1) @ v


class LookedUp(nn.Module):
    """The same of rows of a table."""

    def __init__(self, hides: float = -1e4) -> None:
        super().__init__()
        self.tokens, self.hiding = nn.Embedding(TOKENS, WIDTH), Hiding(hides)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.hiding(self.tokens(ids), padding)


class Hiding(nn.Module):
    """Features that nothing normalizes; `hides` is added to scores of padded keys, or stands in their place."""

    def __init__(self, hides: float = -1e4, *, fills: bool = False, pools: bool = False) -> None:
        super().__init__()
        self.hides, self.fills, self.pools = hides, fills, pools
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        scores, hidden = q @ k.transpose(-1, -2) / WIDTH**0.5, padding[:, None, None, :]
        scores = scores.masked_fill(hidden, self.hides) if self.fills else scores + hidden * self.hides
        seen = (scores.softmax(-1) @ v)[:, 0]
        if self.pools:
            weights = (self.score(seen) + padding[..., None] * -1e4).softmax(1)
            return (seen * weights).sum(1)
        return (seen * ~padding[..., None]).sum(1)


def batch(sequences: int, rows: int, share: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and a mask with holes in which the first and the last row of every sequence live."""
    mask = (torch.rand(sequences, rows) < share).long()
    mask[:, 0] = mask[:, -1] = 1
    return torch.randint(0, TOKENS, (sequences, rows)), mask


def features(sequences: int, rows: int, share: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers instead of ids, and where padding is."""
    return torch.randn(sequences, rows, WIDTH), batch(sequences, rows, share)[1] == 0


class PooledRows(nn.Module):
    """Rows that know nothing of each other, and what is made of the live ones: deep sets, bags of words, point clouds."""

    def __init__(self, pools: str) -> None:
        super().__init__()
        self.pools, self.tokens = pools, nn.Embedding(TOKENS, WIDTH)
        self.rows = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, live = self.rows(self.tokens(ids)), mask[..., None]
        match self.pools:
            case "mean":
                return (x * live).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            case "largest":
                return x.masked_fill(live == 0, -torch.inf).amax(1)
            case _:
                return torch.where(mask.bool()[..., None], x, 0.0).sum(1)
