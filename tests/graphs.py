"""Small profiles for the tests of the planner."""

import random

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.device import Device
from pdtool.artifacts.plan import Plan, Stage
from pdtool.artifacts.profile import Node, Profile, SharedParameter
from pdtool.schedule import SCHEDULES

CPU, GPU = Device(name="test, 1 thread", kind="measured"), Device(name="test", kind="estimated")


def profile_of(nodes, device=CPU, **fields):
    """A profile without a model behind it."""
    made = Profile(
        name="net", model=None, batch_size=8, device=device, step_s=0.0, coverage=0.0, nodes=tuple(nodes), **fields
    )
    made.check()
    return made


def with_nodes(profile: Profile, nodes) -> Profile:
    """A profile with other nodes; unlike model_copy without the graph that was made of the old ones."""
    fields = {name: getattr(profile, name) for name in Profile.model_fields}
    return Profile.model_validate(fields | {"nodes": tuple(nodes)})


def chain(seconds, *, parameters=0, crossing=0, stash=0):
    """input -> a0 -> a1 ...; one forward second of three is forward, the others backward."""
    nodes = [Node(name="x", op="input", module="")]
    for i, time in enumerate(seconds):
        nodes.append(
            Node(
                name=f"a{i}",
                op="Linear",
                module=f"a{i}",
                inputs=(nodes[-1].name,),
                forward_s=time / 3,
                backward_s=2 * time / 3,
                parameter_bytes=parameters,
                output_bytes=crossing,
                gradient_bytes=crossing,
                stash_bytes=stash,
            )
        )
    return profile_of(nodes)


def random_profile(rng: random.Random, operators: int):
    """A DAG with branches, skips, several inputs, a loss, tied parameters, groups and pins, each now and then."""
    nodes = [
        Node(name=f"x{i}", op="input", module="", output_bytes=rng.choice([0, 300]))
        for i in range(rng.choice([1, 1, 2]))
    ]
    for i in range(operators):
        sources = {rng.choice(nodes[-3:]).name, *([rng.choice(nodes).name] if rng.random() < 0.4 else [])}
        nodes.append(
            Node(
                name=f"n{i}",
                op="op",
                module=rng.choice(["", "m", "m.k"]),
                inputs=tuple(sorted(sources)),
                forward_s=rng.choice([0.0, 1.0, 2.0, rng.random()]),
                backward_s=rng.random() * 3,
                update_s=rng.choice([0.0, 0.3]),
                output_bytes=rng.randrange(2000),
                gradient_bytes=rng.randrange(2000),
                parameter_bytes=rng.choice([0, 400, rng.randrange(5000)]),
                stash_bytes=rng.randrange(3000),
                scratch_bytes=250 * (i % 3),
            )
        )
    ends = tuple(sorted({n.name for n in nodes} - {s for n in nodes for s in n.inputs}))
    if rng.random() < 0.5:
        nodes.append(Node(name="loss", op="loss", module="", inputs=ends, forward_s=0.1))
    shared = ()
    if rng.random() < 0.3 and operators > 1:
        users = tuple(n.name for n in rng.sample([n for n in nodes if n.op == "op"], 2))
        nodes = [
            n.model_copy(update={"parameter_bytes": n.parameter_bytes + 700}) if n.name in users else n for n in nodes
        ]
        shared = (SharedParameter(name="w", bytes=700, nodes=users),)
    computing = [n.name for n in nodes if n.op == "op"]
    together = (tuple(rng.sample(computing, 2)),) if operators > 2 and rng.random() < 0.2 else ()
    pin = {rng.choice(computing): rng.choice([0, -1, 1, -2])} if rng.random() < 0.2 else {}
    device = (CPU, GPU)[len(nodes) % 2]
    state_bytes = rng.choice([0.0, 1.0, 2.0])
    return profile_of(nodes, device, shared=shared, together=together, pin=pin, optimizer_state_bytes=state_bytes)


def random_cluster(rng: random.Random):
    """One or two levels, up to four workers, any order of bandwidths, half of them with a memory limit."""
    sizes = rng.choice([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 1)])
    rates = [rng.choice([200.0, 1e3, 5e3, 1e6]) for _ in sizes]
    memory = rng.choice([None, None, 8_000, 15_000, 40_000])
    return make_cluster(sizes, rates, latencies=[rng.choice([0.0, 0.05]) for _ in sizes], memory_bytes=memory)


def plan_of(profile, stages, workers, cluster, schedule="1f1b", in_flight=None, recompute=None, **fields):
    """A plan written by hand."""
    replicas = [len(numbers) for numbers in workers]
    flight = in_flight or SCHEDULES["1f1b"].usual_in_flight(replicas)
    again = recompute or [False] * len(stages)
    return Plan(
        name="net",
        model=None,
        profile="net.json",
        batch_size=profile.batch_size,
        cluster=cluster,
        schedule=schedule,
        weights=SCHEDULES[schedule].policy_names[0],
        stages=tuple(
            Stage(nodes=tuple(n), replicas=len(w), workers=tuple(w), in_flight=f, recompute=r)
            for n, w, f, r in zip(stages, workers, flight, again, strict=True)
        ),
        **fields,
    )
