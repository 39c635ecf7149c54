"""Run `llmsys chat`: serve a page of this machine on which a person talks to the newest
checkpoint, and the routes of OpenAI's API for programs.
"""

import argparse

from llmsys.errors import ConfigError

DEFAULT_PORT = 8_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --port."""
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port on 127.0.0.1; 0: a free one (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; the address is printed first."""
    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.launch.process.run_requirements import require_checkpoint

    config = load_run_config(arguments.config, arguments.overrides)
    require_trusted_run(config, "text")
    if config.model.family != "decoder":
        raise ConfigError(
            f"model.family={config.model.family} continues no text. Use the run of a decoder; for "
            "an encoder-decoder: llmsys translate"
        )
    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(
            f"--port {arguments.port} is no port. Give one from 1 to 65535, or 0 for a free one."
        )
    require_checkpoint(config)
    from llmsys.generate.chat_model import ChatModel
    from llmsys.generate.chat_server import ChatServer
    from llmsys.train.build_trainer import set_num_threads
    from llmsys.train.run_data import load_run_tokenizer
    from llmsys.train.trained_model import load_trained_model

    set_num_threads(config)
    model, checkpoint = load_trained_model(config)
    with ChatServer(ChatModel(model, load_run_tokenizer(config), config), arguments.port) as server:
        print(f"{checkpoint}: open {server.url} on this machine; Ctrl-C ends it", flush=True)
        print(f"programs: the routes of OpenAI's API at {server.url}v1", flush=True)
        server.serve_forever()
    return 0
