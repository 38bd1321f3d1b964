"""The papers' theorems as functions, and what they predict for a pair.

=================  =====================================================================================
``sequential``     SPRINTER: Theorems 3.1, 3.3, 3.4, A.4, equations 5 and 6, with limits and caps
``speculation``    Leviathan et al.: expected tokens a round, best draft length
``front``          Yin et al., Theorems 2, 4 and 5 at one position; batch improvement in closed form
``chains``         Yin et al., Theorems 1 and 3 on Markov chains; finite draft lengths; lossy rules
``bounds``         bounds of SVIP and of Fuzzy Speculative Decoding
``montecarlo``     the real decode loop answered by a Markov chain
``recording``      laws recorded along texts of a pair
``replay``         the real decode loop answered by recorded laws
``predict``        tokens a target call, drift and speed-up of a method; the best parameters
``pareto``         rejections against drift: the front and every method
``flops``          forward FLOPs of models and methods
=================  =====================================================================================

p = target's law, q = draft's law; laws and rates are float64 tensors, or plain numbers, and broadcast.
"""
