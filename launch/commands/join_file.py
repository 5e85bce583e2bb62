"""Write the 0600 file that lets a process on another host join a run: address and password."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from msgspec import structs

from ...common.errors import ConfigError
from ...common.plain import sealed
from ...common.run_folder import existing, read_join, write_private
from .options import newest_run, output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="FILE", help="the file to write")
    parser.add_argument(
        "--run", metavar="DIR", help="the run's folder (default: the newest in runs/)"
    )
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="take a join file in place of a run's folder"
    )
    parser.add_argument(
        "--host", help="the name or address by which the other host reaches the run's Redis"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.source and arguments.run:
        raise ConfigError("name the run with one of --run DIR and --from FILE")
    from ...common.sockets import is_loopback

    if arguments.source:
        join = read_join(Path(arguments.source))
    else:
        folder = existing(arguments.run) if arguments.run else newest_run()
        join = read_join(folder.join)
        if arguments.host and not is_loopback(join.host):
            from ...common.config import build, read_yaml

            if build(read_yaml(folder.config), stored=True).replay.redis_url is not None:
                raise ConfigError(
                    f"--host {arguments.host} is for a run that has its Redis on its head, and this one uses the "
                    f"existing server of replay.redis_url, {join.host}:{join.port}: leave --host out"
                )
    out = output_file(arguments.out)
    if arguments.host:
        join = structs.replace(join, host=arguments.host)
    write_private(out, json.dumps(sealed(structs.asdict(join))) + "\n")
    print(f"{out}: copy it to the other host (it holds the password), then run there:")
    print(f"  .venv/bin/tandem join {out.name} --role rollout")
    if is_loopback(join.host):
        print(
            f"note: the run listens on {join.host}, which other hosts can't reach; start it "
            f"with launch.bind=ADDRESS of a private network, or forward the ports by ssh",
            file=sys.stderr,
        )
    return 0
