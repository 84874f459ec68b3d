"""Time until a worker's first action, and its memory, in epochs of 10^4 to 10^8 samples? `make bench-long-epochs`

Each row is a process of its own, which makes what a worker of the first stage of a 1-1 plan in minibatches of 32 makes
before its first action: the order of the samples, its actions, and the versions that forwards read; then the first
100,000 actions. Loading, computing and messages are left out: they do not know the length of an epoch. The second table
is the launcher's check of the schedule.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from itertools import islice

SIZES = (10**4, 10**6, 10**8)
UPDATES = (4, 100, 1000)
BATCH = 32


def main() -> None:
    """Both tables, or with arguments one row of the first."""
    if sys.argv[1:]:
        _row(int(sys.argv[1]), sys.argv[2])
        return
    sys.stdout.write("samples      schedule        order     first action   100,000 actions   memory besides torch\n")
    for samples in SIZES:
        for schedule in ("1f1b", "2bw", "gpipe"):
            subprocess.run([sys.executable, __file__, str(samples), schedule], check=True)
    from pdtool.schedule import SCHEDULES, ExecutionConfig, check_executable

    sys.stdout.write("\nmicrobatches   schedule        check of the schedule   minibatches checked\n")
    for microbatches in UPDATES:
        for name in SCHEDULES:
            shape = ExecutionConfig.of_schedule(name, microbatches).shape((1, 1))
            start_s = time.perf_counter()
            check_executable(SCHEDULES[name], shape)
            seconds = time.perf_counter() - start_s
            sys.stdout.write(f"{microbatches:<14} {name:<15} {seconds:<23.3f} {shape.representative_minibatches}\n")


def _row(samples: int, schedule: str) -> None:
    from pdtool.runtime.loading.minibatches import Minibatches, sample_order
    from pdtool.schedule import SCHEDULES, ExecutionConfig

    sample_order(0, 1, 10)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.perf_counter()
    minibatches = Minibatches(sample_order(0, 1, samples), BATCH)
    order_s, start_s = time.perf_counter() - start_s, time.perf_counter()
    shape = ExecutionConfig.of_schedule(schedule, 4).shape((1, 1))
    workers = SCHEDULES[schedule].worker_actions(shape, len(minibatches))
    actions, reads = iter(workers[0]), shape.weights.reads(workers, 0, shape.replicas)
    next(actions), next(reads), minibatches[0]
    first_s, start_s = time.perf_counter() - start_s, time.perf_counter()
    for _ in islice(actions, 100_000):
        pass
    for _ in islice(reads, 33_000):
        pass
    later_s = time.perf_counter() - start_s
    memory_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    sys.stdout.write(
        f"{samples:<12} {schedule:<15} {order_s:<7.3f} s {first_s * 1e3:<9.2f} ms   {later_s:<13.2f} s   "
        f"{memory_mib:.0f} MiB\n"
    )


if __name__ == "__main__":
    main()
