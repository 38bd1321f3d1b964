"""Quality of answers: measures of each answer, and comparisons of arms by a judge.

==================  ================================================================================
``metrics``         names, meaning and direction of all measures; means with intervals
``measure``         the entry point: all measures of answers, and the check before a run
``text``            distinct-n and repetition
``rouge``           ROUGE-1, 2 and L against references
``likelihood``      log-likelihood under the target, in batches
``exact``           right or wrong: numbers and choices
``code``            right or wrong: programs; ``sandbox`` runs them in a process of ``sandbox_child``
``duels``           arm against base arm: verdicts, win-tie rates, the offline judge
``llm_judge``       a language model as judge; ``endpoint`` asks it, ``replies`` stores its answers
==================  ================================================================================
"""
