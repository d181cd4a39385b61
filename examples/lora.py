"""Finds clients with similar LoRA adapters by four kinds of rows.

The rows are the raw factors A and B, the factors B alone, the core rows of
`pflcore.interop.lowrank`, and the core rows scaled to length 1 ("directions").

Twelve clients are in three groups, and each group has its own random language. The
clients fine-tune one tiny transformer for one round. Nothing is downloaded. If all
clients start from the same factor A, raw factors are enough. If each client draws its
own A, only the products B A can be compared.

The example needs the extra `lora` (pip install peft transformers) and half a minute.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import pflcore
from pflcore.interop import lowrank

CLIENTS = 12
GROUPS = 3
WORDS = 24  # words of a language
LENGTH = 24  # words of a sentence
BATCH = 16  # sentences of a batch
RANK = 4  # rank of each client's adapter
STEPS = 40  # steps of a client in its round
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
    """Probabilities [WORDS, WORDS] of the next word; each row sums to 1."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(WORDS, WORDS, generator=gen).mul(2).softmax(1)


def sentences(follows: torch.Tensor, count: int, gen: torch.Generator) -> torch.Tensor:
    """Random sentences [count, LENGTH] of the language with these probabilities."""
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
    """Trains the model on new random sentences; returns the last loss."""
    gen = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr)
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
    """The trained adapters of the clients, and the scales of their products.

    With `own_a`, each client draws its own initial factors A.
    """
    states = []
    scales = []
    layers = ["q_proj", "v_proj"]
    for client in range(CLIENTS):
        model = LlamaForCausalLM(CONFIG)
        model.load_state_dict(base)
        # The initial factors A are drawn from this seed.
        torch.manual_seed(100 + client if own_a else 100)
        options = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)
        model = get_peft_model(model, options)
        train(model, [language(1 + client % GROUPS)], STEPS, 1e-2, 200 + client)
        adapter = get_peft_model_state_dict(model)
        states.append({k: v.detach().clone() for k, v in adapter.items()})
        scales.append(lowrank.scales(model))
    return states, scales


def right(rows: torch.Tensor) -> int:
    """Number of clients with their nearest neighbour in their own group."""
    # A client is infinitely far from itself, so that it is not its own neighbour.
    distances = pflcore.pairwise_sqdist(rows).fill_diagonal_(torch.inf)
    nearest = distances.argmin(1)
    return int((nearest % GROUPS == torch.arange(CLIENTS) % GROUPS).sum())


def main() -> None:
    """Prints the table of the four kinds of rows."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    languages = [language(1 + group) for group in range(GROUPS)]
    loss = train(model, languages, WARM_UP, 3e-3, 1)
    base = {k: v.clone() for k, v in model.state_dict().items()}
    print(
        f"Pre-trained to a loss of {loss:.2f}.\n"
        "Clients whose nearest neighbour is in their own group, "
        f"of {CLIENTS} (by chance {CLIENTS * 3 / 11:.1f}):\n"
    )
    print("| first A | factors | B alone | core rows | directions | clusters right |")
    print("|---|---|---|---|---|---|")
    for own_a in (False, True):
        states, scales = adapters(base, own_a)
        rows, layout = lowrank.pack(states, scales)
        factors = pflcore.pack(states).rows
        b_alone = pflcore.pack(states, include="*lora_B*").rows
        directions = torch.nn.functional.normalize(rows)
        counts = [right(r) for r in (factors, b_alone, rows, directions)]
        # The clusters are right where all clients of a group receive the same mean.
        means = pflcore.personalize(rows, "clusters", k=GROUPS, directions=True)
        pure = all(torch.equal(means[i], means[i % GROUPS]) for i in range(CLIENTS))
        first_a = "their own" if own_a else "common"
        cells = [first_a, *counts, "yes" if pure else "no"]
        print(f"| {' | '.join(map(str, cells))} |")
        _, losses = lowrank.unpack(means, layout)
    print(
        f"\nCutting the groups' means to each client's rank {RANK} lost up to "
        f"{max(losses):.0%} of a layer's squared norm."
    )


if __name__ == "__main__":
    main()
