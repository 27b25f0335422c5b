//! The `fencepost` binary.

use std::process::ExitCode;

/// Requests allocate much and keep little: this one costs less than the system's. It is built
/// without huge pages, which took half as much memory again for each call that waits.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    fencepost::cli::main()
}
