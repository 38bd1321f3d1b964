"""How good an answer is: what each answer is measured by, and who wins against whom.

==================  ================================================================================
``metrics``         names, meaning and direction of all measures; means with intervals
``measure``         the entry: all measures of answers, and the check before a run
``text``            distinct-n and repetition
``rouge``           ROUGE-1, 2 and L against references
``likelihood``      log-likelihood under the target, in batches
``exact``           right or wrong: numbers and choices
``code``            right or wrong: programs; ``sandbox`` runs them, ``sandbox_child`` is its other side
``duels``           arm against base arm: verdicts, win-tie rates, the offline judge
``llm_judge``       a language model as judge; ``endpoint`` asks it, ``replies`` keeps what it said
==================  ================================================================================
"""
