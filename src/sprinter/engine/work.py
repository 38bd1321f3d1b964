"""A request in its row, job by job, in a form that survives interrupts."""

from __future__ import annotations

import torch

from sprinter.engine.jobs import Done, Job, Jobs, Models
from sprinter.engine.task import Task

__all__ = ["Work"]


class Work:
    """The jobs of a request in its row: holds the next job, and takes its result.

    An interrupt loses nothing. A job without a result is run again, from the length that it names. If the interrupt hit
    the request's own code, its coroutine is lost, and the request starts over: draws are addressed, so that it writes
    the same text again.

    Args:
        run: the request.
        models, number, prefill_chunk: as in ``Task.jobs``.

    Attributes:
        number: index of its row.
        job: the next job; None at the end.
        over: whether the request has ended, normally or by an error.
        error: the error: logits that are not finite, or an exception of a rule.
    """

    def __init__(self, run: Task, models: Models, number: int, prefill_chunk: int | None = None) -> None:
        self.run, self.number = run, number
        self.job: Job | None = None
        self.over = False
        self.error: Exception | None = None
        self._models, self._chunk = models, prefill_chunk
        self._jobs: Jobs | None = None  # None: not started, or to start over

    @property
    def begun(self) -> bool:
        """Whether ``job`` is known; if not, ``go_on`` starts the request."""
        return self.over or self._jobs is not None

    def go_on(self, done: Done | None = None) -> None:
        """Send the result of ``job``, or its error, and get the next job."""
        jobs, self._jobs = self._jobs, None  # until the next job is known
        try:
            if isinstance(done, Exception):
                raise done
            if jobs is None:
                jobs = self.run.jobs(self._models, self.number, self._chunk)
            job = jobs.send(done) if done is not None else next(jobs)
        except StopIteration:
            self._end(None)
        except (MemoryError, torch.OutOfMemoryError):  # not caused by this request
            raise
        except Exception as error:
            self._end(error)
        else:
            self.job, self._jobs = job, jobs

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            self.run.record.finish = "error"
        self.job, self.error, self.over = None, error, True
