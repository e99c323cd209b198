"""LitServe, whose bodies are JSON: python litserve_app.py PORT."""

import sys

import litserve


class Identity(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["input"]

    def batch(self, inputs):
        return inputs

    def predict(self, batch):
        return batch

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return {"output": output}


if __name__ == "__main__":
    server = litserve.LitServer(Identity(max_batch_size=32, batch_timeout=0.001), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=2, log_level="error", generate_client_file=False)
