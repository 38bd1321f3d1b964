"""The training laboratory: label texts with both models, train gates and stop heads on the labels, evaluate them.

====================  ==============================================================================================
``label_run``         labels a data set, step by step, on this machine or on a Ray cluster
``ray_pool``          a pool of Ray actors, and the models that each of them loads again
``label_step``        one step by ``label_settings``: what turns a batch of prompts into a shard of records
``sources``           reads texts from files and data sets; ``prompts`` splits each into a prompt and its continuation
``prefixes``          writes continuations and collects both models' logits (``batches``); ``scoring`` makes records
``records``           the columns of a record and the files of a data set; ``shards`` writes them
``objectives``        what a head is trained to estimate, computed from the columns
``settings``          presets and settings of training; ``dataset`` loads features, ``train`` fits a head
``calibrate``         fits a calibration; ``threshold`` chooses a gate's τ for a drift
``roc``               evaluates a head: ROC, precision-recall, calibration (``metrics``, ``plots``)
``card``              saves a trained head with its model card
====================  ==============================================================================================
"""
