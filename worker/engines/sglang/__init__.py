"""SGLang as a supervised child process.

The worker's side (`sglang_engine`, `sglang_node`, `process`, `child_connection`, `scheduling`, `sglang_streams`,
`sglang_versions`) imports neither torch nor SGLang. `child_process` runs inside SGLang's processes. Only one
socket pair joins them (`child_connection`).
"""
