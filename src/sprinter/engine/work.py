"""A request in some rows, job by job, whatever interrupts it."""

from __future__ import annotations

import torch

from sprinter.engine.driver import Done, Job, Jobs, Models
from sprinter.engine.task import Task

__all__ = ["Work"]


class Work:
    """What a request does in its rows: the next job, and what follows when that is done.

    Nothing is lost by an interrupt. A job that was not answered for is done again from where its rows start. Where the
    request's own code was broken off half-way its coroutine is gone, and it begins anew: draws are addressed, so that
    it writes the same text again.

    Args:
        run: the request.
        models, number, prompt_piece: as of ``Task.jobs``.

    Attributes:
        number: its row.
        job: what must be done next; None at the end.
        over: whether the request has ended, by itself or by an error of its own.
        error: that error: logits of its rows that are not finite, or what a rule raised.
    """

    def __init__(self, run: Task, models: Models, number: int, prompt_piece: int | None = None) -> None:
        self.run, self.number = run, number
        self.job: Job | None = None
        self.over = False
        self.error: Exception | None = None
        self._models, self._piece = models, prompt_piece
        self._jobs: Jobs | None = None  # None: from the beginning, for the first time or again

    @property
    def begun(self) -> bool:
        """Whether ``job`` is known; else ``go_on`` begins."""
        return self.over or self._jobs is not None

    def go_on(self, done: Done | None = None) -> None:
        """Take what was done for ``job``, an error too; find the next one."""
        jobs, self._jobs = self._jobs, None  # until the next job is known
        try:
            if isinstance(done, Exception):
                raise done
            if jobs is None:
                jobs = self.run.jobs(self._models, self.number, self._piece)
            job = jobs.send(done) if done is not None else next(jobs)
        except StopIteration:
            self._end(None)
        except (MemoryError, torch.OutOfMemoryError):  # not of this request's making
            raise
        except Exception as error:
            self._end(error)
        else:
            self.job, self._jobs = job, jobs

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            self.run.record.finish = "error"
        self.job, self.error, self.over = None, error, True
