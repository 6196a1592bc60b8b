"""All faults, by name; those that a plan's mix may name, and those that it arms."""

from collections.abc import Mapping

from chaos.faults.cluster import CLUSTER_FAULTS
from chaos.faults.fault import Fault
from chaos.faults.files import FILE_FAULTS
from chaos.faults.inside import INSIDE_FAULTS
from chaos.faults.memory import MEMORY_FAULTS
from chaos.faults.network import NETWORK_FAULTS
from chaos.faults.processes import PROCESS_FAULTS
from chaos.faults.storage import ARMED_FAULTS

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for faults in (PROCESS_FAULTS, INSIDE_FAULTS, MEMORY_FAULTS, NETWORK_FAULTS, FILE_FAULTS, CLUSTER_FAULTS)
    for fault in faults
}
ARMED: Mapping[str, Fault] = {fault.name: fault for fault in ARMED_FAULTS}
