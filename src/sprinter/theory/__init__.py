"""The papers' theorems as functions, and what they predict for a pair.

=================  =====================================================================================
``sequential``     SPRINTER: Theorems 3.1, 3.3, 3.4, A.4, equations 5 and 6, with limits and caps
``speculation``    Leviathan et al.: expected tokens a round, best draft length
``regions``        where plain decoding, exact drafts or trust is fastest, by cost ratio and overlap
``front``          Yin et al., Theorems 2, 4 and 5 at one position; batch improvement in closed form
``chains``         Yin et al., Theorems 1 and 3 on Markov chains; short drafts
``bounds``         bounds of SVIP and of Fuzzy Speculative Decoding
``montecarlo``     the real decode loop answered by a Markov chain
``simulation``     the papers' numerical figures: closed forms and Monte Carlo estimates
``recording``      laws recorded along texts of a pair; ``from_labels``: the same from labels of ``sprinter.training``
``outcomes``       laws over large vocabularies reduced to fewer outcomes with the same TV(p, q)
``replay``         the real decode loop answered by recorded laws
``predict``        tokens per target call, drift and speed-up of a method; the best parameters
``pareto``         target use against drift: Theorem 5's front and every method
``flops``          forward FLOPs of models and methods
``fleet``          replicas under load: a simulation of the scheduler, on costs of ``machines``, as ``settings`` say
``figures``        PNG files of all these
=================  =====================================================================================

p = target's law, q = draft's law. Laws and rates are float64 tensors or plain numbers; functions broadcast.
"""
