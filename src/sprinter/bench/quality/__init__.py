"""Quality of answers: measures of each answer, and comparisons of arms by a judge.

==================  ================================================================================
``metrics``         names, meaning and direction of all measures; means with intervals
``measure``         the entry point: all measures of answers, and the check before a run
``rouge``           ROUGE-1, 2 and L against references
``likelihood``      log-likelihood under the target, in batches
``checks``          right or wrong: numbers, choices, programs; ``sandbox`` runs these in a process of ``sandbox_child``
``judges``          arm against base arm: win-tie rates by likelihood or by a language model, which ``endpoint`` asks
==================  ================================================================================
"""
