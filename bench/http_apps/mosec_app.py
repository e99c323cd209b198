"""mosec, with bodies of raw bytes: python mosec_app.py PORT."""

import sys

from mosec import Server, Worker


class Identity(Worker):
    def deserialize(self, data):
        return data

    def serialize(self, data):
        return data

    def forward(self, data):
        return data


if __name__ == "__main__":
    sys.argv = ["mosec", "--address", "127.0.0.1", "--port", sys.argv[1], "--log-level", "error"]
    server = Server()
    server.append_worker(Identity, num=1, max_batch_size=32, max_wait_time=1)
    server.run()
