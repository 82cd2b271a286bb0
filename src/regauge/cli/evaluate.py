"""`regauge evaluate`: loss, accuracy or perplexity of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.console import step_bar
from regauge.cli.keygen import read_key
from regauge.cli.run import check_outputs, deliver, facts_of_run, set_threads


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders, .safetensors files, hub ids (owner/name), or MODEL+ADAPTER.",
        ),
    ],
    data: sample.Data,
    key: Annotated[
        Path | None,
        typer.Option("-k", "--key", metavar="KEY", help="Key file of locked models."),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Also evaluate locked models without the key.")
    ] = False,
    samples: sample.Samples = None,
    field: sample.Field = None,
    attributes: sample.Attributes = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    retrained: Annotated[
        bool,
        typer.Option("--retrained", help="Accept locked models that were trained after locking."),
    ] = False,
    passphrase_file: options.PassphraseFile = None,
    batch: options.Batch = 32,
    json: options.JsonFile = None,
    report: options.Report = None,
    seed: Annotated[int, options.seed_option("Seed of the sample.")] = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure loss, and accuracy or perplexity, of models.

    Evaluates all models on the same data. Each number comes with its standard error and with the
    value of a guess that reads no input.
    """
    check_outputs(json, report)
    if key is None and (control or retrained or passphrase_file is not None):
        raise typer.BadParameter("--control, --retrained and --passphrase-file require -k KEY")
    reading = (data, field, split, tokenizer, length, mean, std, samples)
    names = tuple(options.split_names(attributes) or ())
    source = sample.read_options(*reading, attributes=names)
    import regauge

    set_threads(threads)
    secret = None if key is None else read_key(key, "lock", passphrase_file)
    with step_bar("evaluate") as progress:
        result = regauge.evaluate(
            models,
            source,
            key=secret,
            control=control,
            retrained=retrained,
            batch_size=batch,
            seed=seed,
            device=device,
            facts=facts_of_run(),
            progress=progress,
        )
    return deliver(result.results, str(result), json, report)
