"""Who is alike among clients that send LoRA adapters: by raw factors, by core rows, by
their directions.

Twelve clients in three groups, each group with a language of its own, fine-tune one
tiny transformer for one round (its config is below; nothing is fetched). With one first
A for everybody the factors will do; with an A of their own for each client only
products compare. Needs the extra `lora`: pip install peft transformers. Takes half a
minute.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import pflcore
from pflcore.interop import lowrank

CLIENTS, GROUPS, WORDS, LENGTH, BATCH = 12, 3, 24, 24, 16
RANK, STEPS = 4, 40  # of each client's adapter, and of its round
WARM_UP = 100  # steps of pre-training on all languages
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)


def language(seed: int) -> torch.Tensor:
    """What follows what, [WORDS, WORDS]: rows sum to 1."""
    return (
        torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))
        .mul(2)
        .softmax(1)
    )


def sentences(follows: torch.Tensor, count: int, gen: torch.Generator) -> torch.Tensor:
    """Samples of a language, [count, LENGTH]."""
    words = [torch.randint(WORDS, (count,), generator=gen)]
    for _ in range(LENGTH - 1):
        words.append(torch.multinomial(follows[words[-1]], 1, generator=gen)[:, 0])
    return torch.stack(words, 1)


def train(
    model: torch.nn.Module,
    languages: list[torch.Tensor],
    steps: int,
    lr: float,
    seed: int,
) -> float:
    """Adam on fresh sentences; gives the last loss."""
    gen, loss = torch.Generator().manual_seed(seed), torch.zeros(())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    for step in range(steps):
        x = sentences(languages[step % len(languages)], BATCH, gen)
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def adapters(
    base: dict[str, torch.Tensor], own_a: bool
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, float]]]:
    """Each client's adapter after its round, and its scale."""
    states, scales = [], []
    for client in range(CLIENTS):
        model = LlamaForCausalLM(CONFIG)
        model.load_state_dict(base)
        torch.manual_seed(100 + client * own_a)  # what the first A is drawn from
        layers = ["q_proj", "v_proj"]
        model = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)
        )
        train(model, [language(1 + client % GROUPS)], STEPS, 1e-2, 200 + client)
        states.append(
            {k: v.detach().clone() for k, v in get_peft_model_state_dict(model).items()}
        )
        scales.append(lowrank.scales(model))
    return states, scales


def right(rows: torch.Tensor) -> int:
    """How many clients' nearest neighbours are of their own group."""
    nearest = pflcore.pairwise_sqdist(rows).fill_diagonal_(torch.inf).argmin(1)
    return int((nearest % GROUPS == torch.arange(CLIENTS) % GROUPS).sum())


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    loss = train(model, [language(1 + g) for g in range(GROUPS)], WARM_UP, 3e-3, 1)
    base = {k: v.clone() for k, v in model.state_dict().items()}
    print(
        f"pre-trained to a loss of {loss:.2f}; nearest neighbours of the own group, of "
        f"{CLIENTS} "
        f"(by chance {CLIENTS * 3 / 11:.1f}):\n"
    )
    print(
        "| first A | factors | B alone | core rows | their directions | clusters right "
        "|"
    )
    print("|---|---|---|---|---|---|")
    for own_a in (False, True):
        states, scales = adapters(base, own_a)
        rows, layout = lowrank.pack(states, scales)
        raw, b = (
            pflcore.pack(states).rows,
            pflcore.pack(states, include="*lora_B*").rows,
        )
        means = pflcore.personalize(rows, "clusters", k=GROUPS, directions=True)
        pure = all(torch.equal(means[i], means[i % GROUPS]) for i in range(CLIENTS))
        counts = [right(r) for r in (raw, b, rows, torch.nn.functional.normalize(rows))]
        cells = ["their own" if own_a else "common", *counts, "yes" if pure else "no"]
        print(f"| {' | '.join(map(str, cells))} |")
        lost = lowrank.unpack(means, layout)[1]
    print(
        f"\nThe groups' means, cut to each client's rank {RANK}, lost up to "
        f"{max(lost):.0%} of a layer's square."
    )


if __name__ == "__main__":
    main()
