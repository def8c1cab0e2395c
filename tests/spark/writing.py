"""Writes to format("kmq"), batch and stream, to one broker. An option's dots are underscores: kmq_producer."""

import fixed_port


def writer(df, broker, **options):
    options = {
        "kmq.producers": fixed_port.address(broker),
        **{name.replace("_", "."): v for name, v in options.items()},
    }
    return df.write.format("kmq").mode("append").options(**options)


def stream(df, broker, checkpoint, **options):
    options = {
        "kmq.producers": fixed_port.address(broker),
        **{name.replace("_", "."): v for name, v in options.items()},
    }
    query = df.writeStream.format("kmq").option("checkpointLocation", str(checkpoint)).options(**options)
    return query.trigger(availableNow=True)


def finish(query):
    assert query.awaitTermination(200)
    assert query.exception() is None


def forget_last_commit(checkpoint):
    """What is left when the driver is killed between the sink and Spark's commit: the last batch comes again."""
    last = max(
        (path for path in checkpoint.joinpath("commits").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
    )
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
