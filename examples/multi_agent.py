"""Three agents learn to cover three landmarks: a trust region by K-FAC for each of them.

    python examples/multi_agent.py [--steps 60]

The agents move on a plane and share one reward, minus the mean distance from each landmark to the agent
that is nearest to it. Each has a policy and a K-FAC of its own. At every iteration they are updated one
after another in random order (HATRPO, Kuba et al. 2022; with K-FAC in place of conjugate gradients,
HAKTR). An agent's advantage is multiplied by how much more likely the agents before it have become to do
what they did, so that all steps together improve the team. `rescale="trust-region"` takes each step at
α = min(lr, √(2δ / gᵀF⁻¹g)), F the Fisher matrix of the policy's own distribution: a policy changes by a
KL divergence of about δ, whatever the scale of rewards is (here about 2δ: F takes its two layers one
by one). So does the critic, whose outputs count as Gaussian (ACKTR, Wu et al. 2017). F is solved anew at
every step, since an old one would promise too much.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

import kronfac

AGENTS, GAMES, TIME, DISCOUNT = 3, 64, 10, 0.9
RADIUS = 0.01
MOVES = 0.25 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


class Learner:
    """A network and the K-FAC that keeps its steps inside a trust region."""

    def __init__(self, inputs: int, outputs: int, likelihood: str, radius: float) -> None:
        self.net = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))
        self.likelihood = likelihood
        self.optimizer = kronfac.KFAC(
            self.net,
            torch.optim.SGD(self.net.parameters(), lr=1.0),  # α_max
            fisher="mc",
            rescale="trust-region",
            trust_radius=radius,
            damping=kronfac.Relative(1.0),
            factor_every=1,
            refresh_every=1,
            decay=0.8,
        )

    def outputs(self, x: Tensor) -> Tensor:
        """Those of a pass that the next :meth:`step` belongs to."""
        self.optimizer.zero_grad()
        found = self.net(x)
        self.optimizer.observe(found, likelihood=self.likelihood)
        return found

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()


def observations(places: Tensor, landmarks: Tensor) -> Tensor:
    """What each agent sees, relative to itself: ``[GAMES, AGENTS, ...]``."""
    everything = torch.cat([places, landmarks], dim=1)
    seen = everything[:, None] - places[:, :, None]
    return torch.cat([places, seen.flatten(2)], dim=-1)


@torch.no_grad()
def play(policies: list[Learner]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Observations and actions of each agent, states, and rewards, ``[TIME, GAMES, ...]``."""
    places, landmarks = 2 * torch.rand(2, GAMES, AGENTS, 2) - 1
    moments = []
    for _ in range(TIME):
        seen = observations(places, landmarks)
        logits = torch.stack([one.net(seen[:, i]) for i, one in enumerate(policies)], dim=1)
        actions = Categorical(logits=logits).sample()
        state = torch.cat([places, landmarks], dim=1).flatten(1)
        places = places + MOVES[actions]
        distances = (landmarks[:, :, None] - places[:, None]).norm(dim=-1)
        moments.append((seen, actions, state, -distances.min(dim=-1).values.mean(dim=-1)))
    seen, actions, states, rewards = (torch.stack(parts) for parts in zip(*moments, strict=True))
    return seen, actions, states, rewards


def returns_of(rewards: Tensor) -> Tensor:
    total, found = torch.zeros(GAMES), []
    for reward in reversed(rewards):
        total = reward + DISCOUNT * total
        found.append(total)
    return torch.stack(found[::-1])


def learn(policies: list[Learner], critic: Learner) -> tuple[float, float]:
    """Update the agents one after another, then the critic; the mean reward and the mean divergence."""
    seen, actions, states, rewards = play(policies)
    returns, clock = returns_of(rewards), torch.linspace(-1, 1, TIME).expand(GAMES, TIME).T
    values = critic.outputs(torch.cat([states, clock[..., None]], dim=-1).flatten(0, 1))[:, 0]
    errors = returns.flatten() - values
    advantage = (errors - errors.mean()).detach() / errors.std().detach()
    divergence = 0.0
    for i in torch.randperm(AGENTS).tolist():
        x, chosen = seen[:, :, i].flatten(0, 1), actions[:, :, i].flatten()
        before = Categorical(logits=policies[i].outputs(x))
        # The gradient of the ratio of probabilities is that of the log at the policy that played.
        policies[i].step(-(before.log_prob(chosen) * advantage).mean())
        with torch.no_grad():
            after = Categorical(logits=policies[i].net(x))
            advantage = advantage * (after.log_prob(chosen) - before.log_prob(chosen)).exp()
            divergence += float(kl_divergence(before, after).mean()) / AGENTS
    critic.step(0.5 * errors.square().mean())
    return float(rewards.mean()), divergence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    policies = [Learner(2 + 4 * AGENTS, len(MOVES), "categorical", RADIUS) for _ in range(AGENTS)]
    critic = Learner(4 * AGENTS + 1, 1, "gaussian", RADIUS)
    rewards, divergences = zip(*(learn(policies, critic) for _ in range(steps)), strict=True)
    few = max(1, steps // 10)
    first, last = (sum(part) / few for part in (rewards[:few], rewards[-few:]))
    print(f"KL divergence of a policy's step: {sum(divergences) / steps:.4f}, radius {RADIUS}")
    print(f"reward {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
