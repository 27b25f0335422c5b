//! The map of `src/lib.rs`, kept true: which part of the source may use which.

use std::fs;
use std::path::{Path, PathBuf};

/// One place in the source where something is named.
#[derive(Debug, PartialEq)]
struct Mention {
    file: String,
    line: usize,
    path: String,
}

fn files_under(directory: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for entry in entries {
        if entry.is_dir() {
            files_under(&entry, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
}

/// The source files with their paths below `src/`.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    files_under(&root, &mut found);
    assert!(found.len() > 10, "the source is not where it was");
    let read = |path: &PathBuf| {
        let below = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        (below, fs::read_to_string(path).unwrap())
    };
    found.iter().map(read).collect()
}

/// The text without comments and without what stands in string literals, line by line.
fn code(text: &str) -> String {
    let mut code = String::new();
    let mut characters = text.chars().peekable();
    let mut before = ' ';
    while let Some(c) = characters.next() {
        match c {
            '/' if characters.peek() == Some(&'/') => {
                while characters.peek().is_some_and(|&c| c != '\n') {
                    characters.next();
                }
            }
            '"' if before != '\'' => {
                while let Some(c) = characters.next() {
                    match c {
                        '\\' => drop(characters.next()),
                        '"' => break,
                        '\n' => code.push('\n'),
                        _ => {}
                    }
                }
            }
            c => code.push(c),
        }
        before = c;
    }
    code
}

/// All paths in a text, those inside of `use a::{b, c::d}` written out.
fn paths(text: &str) -> Vec<(usize, String)> {
    let code = code(text);
    let mut found = Vec::new();
    // For each open brace, what stands before it.
    let mut prefixes: Vec<String> = vec![String::new()];
    let mut path = String::new();
    let mut line = 1;
    let mut end = |path: &mut String, prefixes: &[String], line: usize| {
        let prefix = prefixes.last().map_or("", String::as_str);
        let is_whole = path.contains("::") || !prefix.is_empty();
        if !path.is_empty() && is_whole {
            found.push((line, format!("{prefix}{path}")));
        }
        path.clear();
    };
    for c in code.chars() {
        match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | ':' => path.push(c),
            '{' if path.ends_with("::") => {
                let prefix = prefixes.last().map_or("", String::as_str);
                prefixes.push(format!("{prefix}{path}"));
                path.clear();
            }
            '{' => {
                end(&mut path, &prefixes, line);
                prefixes.push(String::new());
            }
            '}' => {
                end(&mut path, &prefixes, line);
                prefixes.pop();
            }
            c => {
                end(&mut path, &prefixes, line);
                line += usize::from(c == '\n');
            }
        }
    }
    found
}

/// Whether `path` is `what`, or something in it.
fn is_in(path: &str, what: &str) -> bool {
    path.strip_prefix(what).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Where files that `concerns` name one of `banned`.
fn mentions(concerns: impl Fn(&str) -> bool, banned: impl Fn(&str) -> bool) -> Vec<Mention> {
    let mut found = Vec::new();
    for (file, text) in sources().into_iter().filter(|(file, _)| concerns(file)) {
        for (line, path) in paths(&text).into_iter().filter(|(_, path)| banned(path)) {
            found.push(Mention { file: file.clone(), line, path });
        }
    }
    found
}

/// One of our own modules, by whatever way it is named from within `src/<module>/`.
fn names_module(path: &str, modules: &[&str]) -> bool {
    modules.iter().any(|module| {
        let roots =
            ["crate::", "fencepost::", "super::", "super::super::", "super::super::super::"];
        roots.iter().any(|root| is_in(path, &format!("{root}{module}")))
    })
}

const OURS: &[&str] =
    &["cli", "config", "coordinator", "domain", "engine", "http", "shutdown", "store", "telemetry"];

#[test]
fn the_list_of_our_modules_is_complete() {
    let lib = sources().into_iter().find(|(file, _)| file == "lib.rs").unwrap().1;
    let modules = lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    assert_eq!(modules.collect::<Vec<_>>(), OURS);
}

#[test]
fn only_the_store_speaks_sql() {
    assert_eq!(mentions(|file| !file.starts_with("store/"), |path| is_in(path, "sqlx")), []);
    assert_ne!(mentions(|file| file.starts_with("store/"), |path| is_in(path, "sqlx")), []);
}

#[test]
fn only_http_knows_its_frameworks() {
    let frameworks = ["axum", "utoipa", "utoipa_axum", "utoipa_swagger_ui", "tower", "tower_http"];
    let banned = |path: &str| frameworks.iter().any(|framework| is_in(path, framework));
    assert_eq!(mentions(|file| !file.starts_with("http/"), banned), []);
    assert_ne!(mentions(|file| file.starts_with("http/"), banned), []);
}

#[test]
fn the_rules_know_nothing_but_themselves() {
    let others: Vec<&str> = OURS.iter().filter(|module| **module != "domain").copied().collect();
    assert_eq!(
        mentions(|file| file.starts_with("domain/"), |path| { names_module(path, &others) }),
        []
    );
}

#[test]
fn the_rules_have_no_input_no_output_no_clock_and_no_chance() {
    let banned = [
        "tokio",
        "tokio_util",
        "sqlx",
        "axum",
        "rand",
        "std::time::Instant",
        "std::time::SystemTime",
        "Instant",
        "SystemTime",
        "std::fs",
        "std::net",
        "std::io",
        "std::env",
        "std::thread",
        "std::process",
        "std::sync::Mutex",
        "std::sync::atomic",
        "OffsetDateTime",
        "time::OffsetDateTime",
        "Uuid::now_v7",
        "Uuid::new_v4",
    ];
    assert_eq!(
        mentions(
            |file| file.starts_with("domain/"),
            |path| { banned.iter().any(|name| is_in(path, name)) }
        ),
        []
    );
}

#[test]
fn stores_do_not_know_who_uses_them() {
    assert_eq!(
        mentions(
            |file| file.starts_with("store/"),
            |path| { names_module(path, &["engine", "coordinator", "http", "cli"]) }
        ),
        []
    );
}

#[test]
fn the_engine_does_not_know_who_uses_it() {
    assert_eq!(
        mentions(
            |file| file.starts_with("engine/"),
            |path| { names_module(path, &["coordinator", "http", "cli"]) }
        ),
        []
    );
}

#[test]
fn the_coordinator_does_not_know_http() {
    assert_eq!(
        mentions(
            |file| file.starts_with("coordinator"),
            |path| names_module(path, &["http", "cli"])
        ),
        []
    );
}

/// The laws above are worth as much as their eyes.
#[test]
fn what_is_forbidden_would_be_seen() {
    let text = r#"
        //! Not `crate::http::router`.
        use crate::{domain::ids::Key, engine::{Hub, wait::Verdict}};
        use std::time::{Duration, Instant}; // crate::cli
        fn a() -> crate::coordinator::Reply { let text = "crate::config::Dsn"; tokio::spawn(a()); }
        mod b { use super::super::http; use sqlx; }
    "#;
    let found: Vec<(usize, String)> = paths(text);
    let named = |what: &str| found.iter().any(|(_, path)| is_in(path, what));
    for seen in [
        "crate::domain::ids::Key",
        "crate::engine::Hub",
        "crate::engine::wait::Verdict",
        "std::time::Instant",
        "crate::coordinator::Reply",
        "tokio::spawn",
        "super::super::http",
    ] {
        assert!(named(seen), "{seen} in {found:?}");
    }
    for unseen in ["crate::http", "crate::cli", "crate::config"] {
        assert!(!named(unseen), "{unseen} in {found:?}");
    }
    assert!(names_module("crate::http", &["http"]) && names_module("super::http::a", &["http"]));
    assert!(!names_module("crate::https", &["http"]) && !is_in("tokio_util::sync", "tokio"));
    assert_eq!(found.iter().find(|(_, path)| path == "crate::engine::Hub").unwrap().0, 3);
}
