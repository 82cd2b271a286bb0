"""What models are worth: loss, accuracy or perplexity of several models on the same data, with
standard errors and the baseline of a guess.

    models    models and data of any kind, opened and scored
    report    the result: one table, as text, JSON or a page

`regauge.evaluate` adds the keys of locked models (`locking.evaluation`); applications that report
what they wrote call `evaluate_sources`, or `evaluate_modules` on live modules.
"""
