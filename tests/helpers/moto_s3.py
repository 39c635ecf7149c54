"""moto's S3 server on a port of this machine: an implementation of the protocol that is not
ours.
"""

import logging
from collections.abc import Mapping
from typing import Any, Self

import boto3  # type: ignore[import-untyped]
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from tests.helpers.fake_s3 import BUCKETS, StorageServer


class MotoS3(StorageServer):
    """The server in a thread of this process, with two buckets that are empty."""

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", 0)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        names = self.environment()
        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=names["AWS_DEFAULT_REGION"],
            aws_access_key_id=names["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=names["AWS_SECRET_ACCESS_KEY"],
        )
        for bucket in BUCKETS:
            client.create_bucket(Bucket=bucket)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()

    @property
    def objects(self) -> Mapping[str, bytes]:
        """The content of the first bucket by key, as it is now."""
        keys = self._get_keys()
        return {name: keys[name].value for name in list(keys)}

    def count_objects(self) -> int:
        """Return how many objects the first bucket holds."""
        return len(self._get_keys())

    def _get_keys(self) -> Any:
        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets["crawl"].keys
