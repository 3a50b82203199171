"""The part of libucp's C interface that the KV daemon uses, declared for cffi's ABI mode.

Handles are declared as integers, so that a call needs no casts: it is the cheapest form of
a call through cffi. Structures that UCX extends at their end are guarded by a field mask;
they are declared up to the last field used here, which holds for UCX 1.12 and later
(source: ``ucp/api/ucp.h``). ``ucs_status_t`` is an enum packed into one byte.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import cffi

API_VERSION = (1, 12)  # the oldest interface that has all that is used

DECLARATIONS = """
typedef int8_t ucs_status_t;
typedef intptr_t status_ptr_t;      /* 0: done; -100..-1: error; else a request */

typedef struct { uint64_t field_mask, features; size_t request_size; uintptr_t request_init,
    request_cleanup; uint64_t tag_sender_mask; int mt_workers_shared; size_t estimated_num_eps,
    estimated_num_ppn; const char *name; size_t node_local_id; } ucp_params_t;
typedef struct { uint64_t field_mask; int thread_mode; unsigned long cpu_mask[16]; unsigned events;
    uintptr_t user_data; int event_fd; uint64_t flags; const char *name; size_t am_alignment;
    uint64_t client_id; } ucp_worker_params_t;
typedef struct { uint64_t field_mask; int thread_mode; uint32_t address_flags; uintptr_t address;
    size_t address_length, max_am_header; char name[32]; size_t max_debug_string; } ucp_worker_attr_t;
typedef void (*error_callback_t)(uintptr_t arg, uintptr_t ep, ucs_status_t status);
typedef struct { uint64_t field_mask; uintptr_t address; int err_mode; error_callback_t error_callback;
    uintptr_t error_arg, user_data; unsigned flags; uintptr_t sockaddr; unsigned sockaddr_length;
    uintptr_t conn_request; const char *name; uintptr_t local_sockaddr; unsigned local_length;
    } ucp_ep_params_t;
typedef struct { const char *transport_name, *device_name; } ucp_transport_entry_t;
typedef struct { uint64_t field_mask; char name[32], local_sockaddr[128], remote_sockaddr[128];
    ucp_transport_entry_t *entries; unsigned num_entries; size_t entry_size; uintptr_t user_data;
    } ucp_ep_attr_t;
typedef struct { uint64_t field_mask; uintptr_t address; size_t length; unsigned flags, prot;
    int memory_type; uintptr_t exported_memh_buffer; } ucp_mem_map_params_t;
typedef struct { uint32_t op_attr_mask, flags; uintptr_t request, callback; uint64_t datatype;
    uintptr_t user_data, reply_buffer; int memory_type; uintptr_t recv_info, memh;
    uint64_t remote_datatype; uintptr_t remote; size_t remote_count; } ucp_request_param_t;
typedef ucs_status_t (*am_callback_t)(uintptr_t arg, const char *header, size_t header_length,
    uintptr_t data, size_t length, uintptr_t param);
typedef struct { uint64_t field_mask; unsigned id; uint32_t flags; am_callback_t callback;
    uintptr_t arg; } ucp_am_handler_param_t;

const char *ucs_status_string(ucs_status_t status);
void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
ucs_status_t ucp_config_read(const char *prefix, const char *file, uintptr_t *config);
ucs_status_t ucp_config_modify(uintptr_t config, const char *name, const char *value);
void ucp_config_release(uintptr_t config);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params,
    uintptr_t config, uintptr_t *context);
void ucp_cleanup(uintptr_t context);
void ucp_context_print_info(uintptr_t context, uintptr_t stream);
ucs_status_t ucp_worker_create(uintptr_t context, const ucp_worker_params_t *params, uintptr_t *worker);
void ucp_worker_destroy(uintptr_t worker);
ucs_status_t ucp_worker_query(uintptr_t worker, ucp_worker_attr_t *attributes);
void ucp_worker_release_address(uintptr_t worker, uintptr_t address);
unsigned ucp_worker_progress(uintptr_t worker);
ucs_status_t ucp_worker_get_efd(uintptr_t worker, int *fd);
ucs_status_t ucp_worker_arm(uintptr_t worker);
ucs_status_t ucp_worker_set_am_recv_handler(uintptr_t worker, const ucp_am_handler_param_t *param);
ucs_status_t ucp_ep_create(uintptr_t worker, const ucp_ep_params_t *params, uintptr_t *ep);
ucs_status_t ucp_ep_query(uintptr_t ep, ucp_ep_attr_t *attributes);
status_ptr_t ucp_ep_close_nbx(uintptr_t ep, const ucp_request_param_t *param);
status_ptr_t ucp_ep_flush_nbx(uintptr_t ep, const ucp_request_param_t *param);
ucs_status_t ucp_mem_map(uintptr_t context, const ucp_mem_map_params_t *params, uintptr_t *memh);
ucs_status_t ucp_mem_unmap(uintptr_t context, uintptr_t memh);
ucs_status_t ucp_rkey_pack(uintptr_t context, uintptr_t memh, uintptr_t *buffer, size_t *size);
void ucp_rkey_buffer_release(uintptr_t buffer);
ucs_status_t ucp_ep_rkey_unpack(uintptr_t ep, const char *buffer, uintptr_t *rkey);
void ucp_rkey_destroy(uintptr_t rkey);
status_ptr_t ucp_put_nbx(uintptr_t ep, uintptr_t buffer, size_t count, uint64_t remote, uintptr_t rkey,
    uintptr_t param);
status_ptr_t ucp_am_send_nbx(uintptr_t ep, unsigned id, const char *header, size_t header_length,
    uintptr_t buffer, size_t count, const ucp_request_param_t *param);
ucs_status_t ucp_request_check_status(status_ptr_t request);
void ucp_request_free(status_ptr_t request);
"""

FEATURE_RMA, FEATURE_WAKEUP, FEATURE_AM = 1 << 1, 1 << 4, 1 << 6
OP_FLAGS, OP_MEMH, OP_MULTI_SEND = 1 << 4, 1 << 8, 1 << 19
CLOSE_FORCE = 1
ERROR_MODE_PEER = 1
IN_PROGRESS, ERR_BUSY = 1, -15
LOWEST_ERROR = -100
MEMORY_TYPES = {"memfd": 0, "cuda-vmm": 1}

ffi: Any = cffi.FFI()  # what is declared at run time has no types
ffi.cdef(DECLARATIONS)


def default_library() -> str:
    """Return the libucp to load when none is set: the ``libucx-cu12`` wheel's, else the system's."""
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "lib" / "libucp.so.0"
        if path.exists():
            return str(path)
    return "libucp.so.0"


def load(path: str) -> Any:
    """Open libucp; raises OSError."""
    return ffi.dlopen(path, ffi.RTLD_NOW | ffi.RTLD_LOCAL)
