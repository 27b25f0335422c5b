//! Tells cargo that the migrations are part of the binary, which `sqlx::migrate!` cannot.

fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
