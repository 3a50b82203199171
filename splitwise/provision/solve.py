"""Answer a question for all its designs at once, on workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from splitwise.provision.probe import Prober
from splitwise.provision.search import Answer, fastest, smallest
from splitwise.sim.workers import LocalWorkers

if TYPE_CHECKING:
    from splitwise.provision.designs import Design
    from splitwise.provision.plan import Question
    from splitwise.provision.probe import Watch
    from splitwise.sim.workers import Workers


def solve(
    question: Question, workers: Workers | None = None, watch: Watch = lambda *told: None
) -> list[Answer]:
    """Return one answer per design, in their order; `watch` hears how far each one is.

    A search often has only one cluster to ask about, so that designs are searched side by
    side as far as there are workers. What is found does not depend on that.
    """
    workers = workers or LocalWorkers(question.problem)
    prober = Prober(question.problem, workers, watch)

    def one(design: Design) -> Answer:
        if question.rate is not None:
            answer = smallest(prober, design, question.rate, question.by, question.bounds)
        else:
            amount = question.budget or 0.0
            answer = fastest(prober, design, question.by, amount, question.bounds, step=question.step)
        prober.expect(design, 0.0)
        return answer

    if workers.size == 1:
        return [one(design) for design in question.designs]
    with ThreadPoolExecutor(min(workers.size, len(question.designs))) as threads:
        searches = [threads.submit(one, design) for design in question.designs]
        try:
            return [search.result() for search in searches]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            workers.close()  # threads that still search meet closed workers and end
            raise
