"""A Ray cluster of several nodes on this machine, each at a loopback address of its own.

Prints its address; an address of a node on stdin removes that node, as if it had lost its power;
the end of stdin ends it.
"""

import sys

from ray.cluster_utils import Cluster

HEAD = "127.0.0.2"
NODES = ("127.0.0.3", "127.0.0.4")
STORE = 80 * 2**20  # the least that Ray takes


def main() -> None:
    kept = {"object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(
        head_node_args={**kept, "num_cpus": 1, "node_ip_address": HEAD}, initialize_head=True
    )
    nodes = {at: cluster.add_node(**kept, num_cpus=4, node_ip_address=at) for at in NODES}
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[line.strip()], allow_graceful=False)
        print("removed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
