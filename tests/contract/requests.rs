//! The HTTP edge: what is read, what is refused, and how a refusal looks.
//!
//! Most of this runs on one store, since no request here gets as far as the store; what keys may
//! look like is asked of every store.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use fencepost::coordinator::{Coordinator, CoordinatorOptions};
use fencepost::http::Rival;
use serde_json::{Map, Value, json};
use tokio::io::AsyncWriteExt;
use tokio::time::{interval, timeout};

use crate::check::{
    BRIEF, claim, force, header, limit, no_nulls, problem, random_text, until_lapsed, wrong_members,
};
use crate::on_every_store;
use crate::support::process::Process;
use crate::support::{Client, Kind, Reply, Service};
use crate::wire::{Wire, exchange, head, post, post_chunked};

/// What a member holds.
#[derive(Clone, Copy, PartialEq)]
enum Holds {
    Text,
    Integer,
    Object,
    Array,
}

/// A member of a request: its name, what it holds, whether it must be there, a fitting value.
type Member = (&'static str, Holds, bool, &'static str);

const KEY: Member = ("key", Holds::Text, true, r#""k""#);
const OWNER: Member = ("owner_id", Holds::Text, true, r#""a""#);
const VERSION: Member = ("version", Holds::Integer, true, "7");
const OPTIONAL_VERSION: Member = ("version", Holds::Integer, false, "7");
const OPTIONAL_TTL: Member = ("ttl_ms", Holds::Integer, false, "30000");
const WAIT: Member = ("wait_ms", Holds::Integer, false, "0");

/// Every call with a body.
const CALLS: &[(&str, &[Member])] = &[
    (
        "/v1/leases/claim",
        &[
            KEY,
            OWNER,
            ("ttl_ms", Holds::Integer, true, "30000"),
            ("attempt_id", Holds::Text, false, r#""0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00""#),
            WAIT,
            ("metadata", Holds::Object, false, "{}"),
        ],
    ),
    ("/v1/leases/renew", &[KEY, OWNER, VERSION, OPTIONAL_TTL]),
    (
        "/v1/leases/renew-many",
        &[OWNER, OPTIONAL_TTL, ("items", Holds::Array, true, r#"[{"key":"k","version":7}]"#)],
    ),
    ("/v1/leases/release", &[KEY, OWNER, VERSION]),
    ("/v1/leases/wait", &[KEY, OPTIONAL_VERSION, WAIT]),
    ("/v1/leases/verify", &[KEY, VERSION]),
    ("/v1/leases/force-release", &[KEY, ("reason", Holds::Text, true, r#""r""#), OPTIONAL_VERSION]),
];

const GETS: &[&str] = &[
    "/v1/leases",
    "/v1/leases/state?key=k",
    "/v1/capabilities",
    "/livez",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/openapi-3.0.json",
    "/docs/",
];

/// A body of these members, with `name` replaced by other text, if any.
fn body(members: &[Member], name: &str, other: Option<&str>) -> String {
    let parts = members.iter().filter_map(|&(member, _, _, value)| {
        let value = if member == name { other? } else { value };
        Some(format!("\"{member}\":{value}"))
    });
    format!("{{{}}}", parts.collect::<Vec<_>>().join(","))
}

async fn start() -> Service {
    Service::start(Kind::Memory).await
}

/// Whether a service that was sent something odd goes on as before.
async fn lives(client: &Client) {
    assert_eq!(client.get("/livez").await.status, 200);
    let key = format!("alive-{}", rand::random::<u64>());
    client.claim(&key, "a", 30_000).await.expect("claimed");
}

#[tokio::test]
async fn each_call_accepts_its_members_in_any_order_and_spacing() {
    let service = start().await;
    for &(path, members) in CALLS {
        let mut reversed = members.to_vec();
        reversed.reverse();
        let plain = body(&reversed, "", None);
        for text in [plain.clone(), plain.replace(',', " ,\r\n\t").replace("\":", "\" : ")] {
            let reply = service.post_raw(path, format!("\n {text} \n")).await;
            assert!(matches!(reply.status, 200 | 409), "{path} {text} {reply:#?}");
        }
        let escaped = plain.replace("\"owner_id\"", r#""owner\u005fid""#);
        let reply = service.post_raw(path, escaped).await;
        assert!(matches!(reply.status, 200 | 409), "{path} {reply:#?}");
    }
}

#[tokio::test]
async fn members_that_a_call_does_not_have_are_refused() {
    let service = start().await;
    for &(path, members) in CALLS {
        for other in ["other", "Key", "key ", "ttl", "namespace", "scope", "", "\\u0000", "é"] {
            let mut text = body(members, "", None);
            text.truncate(text.len() - 1);
            let reply = service.post_raw(path, format!("{text},\"{other}\":1}}")).await;
            let name: String = serde_json::from_str(&format!("\"{other}\"")).unwrap();
            assert_eq!(wrong_members(&reply), [name], "{path} {other}");
        }
    }
}

/// A proxy may read the first of two members where the service reads the last
/// (`serde-rs/json#762`).
#[tokio::test]
async fn a_member_given_twice_is_refused_though_both_are_equal() {
    let service = start().await;
    for &(path, members) in CALLS {
        for &(name, _, _, value) in members {
            let mut text = body(members, "", None);
            text.truncate(text.len() - 1);
            for spelt in [name.to_owned(), name.replacen('e', "\\u0065", 1)] {
                let reply = service.post_raw(path, format!("{text},\"{spelt}\":{value}}}")).await;
                assert_eq!(wrong_members(&reply), [name], "{path} {spelt}");
            }
        }
    }
}

#[tokio::test]
async fn a_required_member_must_be_there_and_null_is_not_there() {
    let service = start().await;
    for &(path, members) in CALLS {
        for &(name, _, _, _) in members.iter().filter(|(_, _, is_required, _)| *is_required) {
            for other in [None, Some("null")] {
                let reply = service.post_raw(path, body(members, name, other)).await;
                assert_eq!(wrong_members(&reply), [name], "{path} {other:?}");
            }
        }
        let reply = service.post_raw(path, "{}").await;
        let required: HashSet<String> = members
            .iter()
            .filter(|(_, _, is_required, _)| *is_required)
            .map(|(name, ..)| (*name).to_owned())
            .collect();
        assert_eq!(wrong_members(&reply).into_iter().collect::<HashSet<_>>(), required, "{path}");
    }
}

#[tokio::test]
async fn null_for_an_optional_member_counts_as_absent() {
    let service = start().await;
    for &(path, members) in CALLS {
        for &(name, _, _, _) in members.iter().filter(|(name, _, is_required, _)| {
            // Its default is to wait for long.
            !*is_required && (*name, path) != ("wait_ms", "/v1/leases/wait")
        }) {
            let absent = service.post_raw(path, body(members, name, None)).await;
            let null = service.post_raw(path, body(members, name, Some("null"))).await;
            assert!(matches!(absent.status, 200 | 409), "{path} {name} {absent:#?}");
            assert!(matches!(null.status, 200 | 409), "{path} {name} {null:#?}");
        }
    }
    let reply = service.post_raw("/v1/leases/wait", r#"{"key":"free","wait_ms":null}"#).await;
    assert_eq!(reply.expect("released").reason(), "not_held");
}

/// An integer is an integer: no fraction, no exponent, no text; and what a 64-bit number cannot
/// hold is not cut down to something that it can (`serde-rs/json#1170`).
#[tokio::test]
async fn values_of_the_wrong_type_are_refused_by_name() {
    let service = start().await;
    let texts = ["\"k\"", "\"\"", "\"7\"", "\"30000\"", "\"null\""];
    let integers = ["7", "0", "30000"];
    let others = [
        "true",
        "false",
        "1.0",
        "30000.0",
        "3e4",
        "1E3",
        "-0",
        "-0.0",
        "1e400",
        "-1e400",
        "18446744073709551616",
        "9223372036854775808",
        "-9223372036854775809",
        "9.007199254740993e15",
    ];
    let objects = ["{}", "{\"a\":\"b\"}", "{\"$serde_json::private::RawValue\":\"1\"}"];
    let arrays = ["[]", "[7]", "[\"k\"]"];
    for &(path, members) in CALLS {
        for &(name, holds, _, _) in members {
            let mut wrong: Vec<&str> = others.into();
            for (values, kind) in [
                (&texts[..], Holds::Text),
                (&integers[..], Holds::Integer),
                (&objects[..], Holds::Object),
                (&arrays[..], Holds::Array),
            ] {
                wrong.extend(if kind == holds { &[] } else { values });
            }
            for value in wrong {
                let reply = service.post_raw(path, body(members, name, Some(value))).await;
                let names = wrong_members(&reply);
                assert_eq!(names, [name], "{path} {name}: {value}");
            }
        }
    }
    assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
}

#[tokio::test]
async fn all_wrong_members_are_named_at_once() {
    let service = start().await;
    let text =
        r#"{"key":"","owner_id":7,"ttl_ms":0,"wait_ms":-1,"attempt_id":"x","other":1,"other":2}"#;
    let names: HashSet<String> =
        wrong_members(&service.post_raw("/v1/leases/claim", text).await).into_iter().collect();
    let expected = ["key", "owner_id", "ttl_ms", "wait_ms", "attempt_id", "other"];
    assert_eq!(names, expected.map(str::to_owned).into());
}

/// Zero is a value, and too small; it is never "not given" (`hashicorp/consul#4508`), nor "for
/// ever" (`ROCm/spur#826`), and nothing below the minimum underflows (`badboy/redlock-rs#21`).
#[tokio::test]
async fn a_ttl_is_within_its_limits_exactly() {
    let service = start().await;
    let limits = service.get("/v1/capabilities").await.body["limits"].clone();
    let (min, max) = (limits["ttl_ms_min"].as_i64(), limits["ttl_ms_max"].as_i64());
    assert_eq!((min, max), (Some(100), Some(86_400_000)));
    let (min, max) = (min.unwrap(), max.unwrap());
    let wrong = [i64::MIN, -2, -1, 0, 1, 2, 5, 10, 49, min - 1, max + 1, i64::MAX];
    for ttl_ms in wrong {
        assert_eq!(wrong_members(&service.claim("k", "a", ttl_ms).await), ["ttl_ms"], "{ttl_ms}");
    }
    assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
    for (n, ttl_ms) in [min, min + 1, 29_999, 30_000, 30_001, max - 1, max].into_iter().enumerate()
    {
        let granted = service.claim(&format!("k{n}"), "a", ttl_ms).await.expect("claimed");
        assert_eq!(granted.body["lease"]["ttl_ms"], ttl_ms);
        assert_eq!(granted.body["lease"]["renew_after_ms"], ttl_ms / 3);
    }
    let held = service.claim("k", "a", max).await.expect("claimed").version();
    for ttl_ms in wrong {
        for (path, items) in [("renew", None), ("renew-many", Some(()))] {
            let mut request = json!({"owner_id": "a", "ttl_ms": ttl_ms});
            if items.is_some() {
                request["items"] = json!([{"key": "k", "version": held}]);
            } else {
                request["key"] = json!("k");
                request["version"] = json!(held);
            }
            let reply = service.post(&format!("/v1/leases/{path}"), request).await;
            assert_eq!(wrong_members(&reply), ["ttl_ms"], "{path} {ttl_ms}");
        }
    }
}

#[tokio::test]
async fn a_version_is_within_its_limits_exactly() {
    let service = start().await;
    let max = limit(&service, "version_max").await;
    assert_eq!(max, (1 << 53) - 1);
    for &(path, members) in CALLS {
        if !members.iter().any(|(name, ..)| *name == "version") {
            continue;
        }
        for version in ["1", "9007199254740991"] {
            let reply = service.post_raw(path, body(members, "version", Some(version))).await;
            assert!(matches!(reply.status, 200 | 409), "{path} {version} {reply:#?}");
        }
        for version in ["0", "-1", "9007199254740992", "9007199254740993", "9223372036854775807"] {
            let reply = service.post_raw(path, body(members, "version", Some(version))).await;
            assert_eq!(wrong_members(&reply), ["version"], "{path} {version}");
        }
    }
}

#[tokio::test]
async fn a_wait_is_within_its_limits_exactly() {
    let service = start().await;
    let max = limit(&service, "wait_ms_max").await;
    assert_eq!(max, 50_000);
    for &(path, members) in CALLS {
        if !members.iter().any(|(name, ..)| *name == "wait_ms") {
            continue;
        }
        let reply = service.post_raw(path, body(members, "wait_ms", Some("50000"))).await;
        assert_eq!(reply.status, 200, "{reply:#?}");
        force(&service, "k", None).await;
        for wait_ms in ["-1", "50001", "4294967296", "9223372036854775807"] {
            let reply = service.post_raw(path, body(members, "wait_ms", Some(wait_ms))).await;
            assert_eq!(wrong_members(&reply), ["wait_ms"], "{path} {wait_ms}");
        }
    }
}

#[tokio::test]
async fn an_attempt_is_named_by_a_uuid() {
    let service = start().await;
    for attempt in [
        "",
        "a",
        "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f0",
        "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f000",
        "0198f2c47d1e7c3a9b1f3d2a6c5e4f00",
        "{0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00}",
        "urn:uuid:0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00",
        "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f0g",
        " 0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00",
        "0198f2c4_7d1e_7c3a_9b1f_3d2a6c5e4f00",
    ] {
        let body = json!({"key": "k", "owner_id": "a", "ttl_ms": 30_000, "attempt_id": attempt});
        assert_eq!(wrong_members(&claim(&service, body).await), ["attempt_id"], "{attempt}");
    }
    let nil = "00000000-0000-0000-0000-000000000000";
    let body = json!({"key": "k", "owner_id": "a", "ttl_ms": 30_000, "attempt_id": nil});
    let first = claim(&service, body.clone()).await.expect("claimed");
    assert_eq!(claim(&service, body).await.expect("claimed").version(), first.version());
}

/// Texts of exactly so many bytes, of one to four bytes a character, even and at random.
fn texts_of(bytes: usize) -> Vec<String> {
    let fill = |character: char| {
        let count = bytes / character.len_utf8();
        let text = character.to_string().repeat(count);
        text.clone() + &"x".repeat(bytes - text.len())
    };
    let ascii: String = ('!'..='~').collect();
    vec![
        fill('a'),
        fill('é'),
        fill('€'),
        fill('😀'),
        random_text(bytes, &ascii),
        random_text(bytes, "aé€😀ßΩ中\u{10ffff}\u{301}%_\\'\""),
    ]
}

on_every_store! {
    /// The verdict on a long key must not depend on how well it compresses
    /// (`triggerdotdev/trigger.dev#3560`).
    async fn a_key_is_as_long_as_allowed_and_not_a_byte_longer(service) {
        let most = limit(&service, "key_bytes").await;
        assert_eq!(most, 512);
        for key in texts_of(most).into_iter().chain(texts_of(255)).chain(texts_of(1)) {
            let granted = service.claim(&key, "a", 30_000).await;
            // Of one byte, all but the random ones are the same.
            if granted.outcome() == "claimed" {
                assert_eq!(granted.body["lease"]["key"], key);
            }
            assert_eq!(service.state(&key).await["state"], "held");
            service.claim(&key, "b", 30_000).await.expect("held");
        }
        for bytes in [most + 1, 2_704, 2_705, 8_192, 30_000] {
            for key in texts_of(bytes) {
                let reply = service.claim(&key, "a", 30_000).await;
                assert_eq!(wrong_members(&reply), ["key"], "{bytes} bytes");
                if bytes < 8_192 {
                    let reply = service.get_with("/v1/leases/state", &[("key", &*key)]).await;
                    assert_eq!(wrong_members(&reply), ["key"], "{bytes} bytes");
                }
            }
        }
        assert_eq!(wrong_members(&service.claim("", "a", 30_000).await), ["key"]);
    }

    async fn an_owner_is_as_long_as_allowed_and_not_a_byte_longer(service) {
        let most = limit(&service, "owner_id_bytes").await;
        assert_eq!(most, 256);
        for (n, owner) in texts_of(most).into_iter().enumerate() {
            let key = format!("k{n}");
            let granted = service.claim(&key, &owner, 30_000).await.expect("claimed");
            assert_eq!(granted.body["lease"]["owner_id"], owner);
            service.renew(&key, &owner, granted.version()).await.expect("renewed");
            service.release(&key, &owner, granted.version()).await.expect("released");
        }
        for owner in texts_of(most + 1).into_iter().chain([String::new()]) {
            assert_eq!(wrong_members(&service.claim("k", &owner, 30_000).await), ["owner_id"]);
            assert_eq!(wrong_members(&service.renew("k", &owner, 1).await), ["owner_id"]);
            assert_eq!(wrong_members(&service.release("k", &owner, 1).await), ["owner_id"]);
        }
    }

    async fn metadata_is_as_large_as_allowed_and_not_a_byte_larger(service) {
        let most = limit(&service, "metadata_bytes").await;
        assert_eq!(most, 4_096);
        // {"a":"…"}, of which eight bytes are not text.
        let plain = |bytes| {
            texts_of(bytes).into_iter().filter(|text| !text.contains(['"', '\\']))
        };
        assert!(plain(most).count() >= 4);
        for (n, text) in plain(most - 8).enumerate() {
            let (key, metadata) = (format!("k{n}"), json!({"a": text}));
            let body = json!({"key": key, "owner_id": "a", "ttl_ms": 30_000, "metadata": metadata});
            let granted = claim(&service, body).await.expect("claimed");
            assert_eq!(granted.body["lease"]["metadata"], metadata);
            assert_eq!(service.state(&key).await["metadata"], metadata);
        }
        for text in texts_of(most - 7) {
            let body = json!({"key": "other", "owner_id": "a", "ttl_ms": 30_000,
                              "metadata": {"a": text}});
            assert_eq!(wrong_members(&claim(&service, body).await), ["metadata"]);
        }
        // What must be escaped counts as it is escaped.
        for (quotes, fits) in [((most - 8) / 2, true), ((most - 8) / 2 + 1, false)] {
            let body = json!({"key": "quotes", "owner_id": "a", "ttl_ms": 30_000,
                              "metadata": {"a": "\"".repeat(quotes)}});
            let reply = claim(&service, body).await;
            assert_eq!(reply.status, if fits { 200 } else { 400 });
            force(&service, "quotes", None).await;
        }
        // White space between members is not part of it.
        let wide = format!(
            r#"{{"key":"wide","owner_id":"a","ttl_ms":30000,"metadata":{{{}"a":"b"}}}}"#,
            " ".repeat(most)
        );
        service.post_raw("/v1/leases/claim", wide).await.expect("claimed");
    }

    /// NUL and its like are refused before a store chokes on them.
    async fn control_characters_are_refused_everywhere_alike(service) {
        for code in (0..0x20).chain([0x7f]) {
            let text = format!("a{}b", char::from(code));
            assert_eq!(wrong_members(&service.claim(&text, "a", 30_000).await), ["key"]);
            assert_eq!(wrong_members(&service.claim("k", &text, 30_000).await), ["owner_id"]);
            let body = json!({"key": "k", "reason": text});
            let reply = service.post("/v1/leases/force-release", body).await;
            assert_eq!(wrong_members(&reply), ["reason"]);
            let reply = service.get_with("/v1/leases/state", &[("key", &*text)]).await;
            assert_eq!(wrong_members(&reply), ["key"]);
        }
        // The next ones after them are text.
        let text = " \u{80}\u{9f}\u{a0}~";
        service.claim(text, text, 30_000).await.expect("claimed");
        assert_eq!(service.state(text).await["owner_id"], text);
        assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
    }
}

#[tokio::test]
async fn what_is_not_json_is_refused() {
    let service = start().await;
    let valid = r#"{"key":"k","owner_id":"a","ttl_ms":30000}"#;
    let mut wrong: Vec<Vec<u8>> = (0..valid.len()).map(|end| valid[..end].into()).collect();
    let others: [&[u8]; 16] = [
        b" ",
        b"{}{}",
        b"{} 1",
        b"\xef\xbb\xbf{}",
        b"{\"key\":\"\xff\"}",
        b"{\"key\":\"\xc3\x28\"}",
        b"{'key':'k'}",
        b"{key:1}",
        b"{\"key\":01}",
        b"{\"key\":+1}",
        b"{\"key\":NaN}",
        b"{\"key\":\"a\nb\"}",
        b"{\"key\":\"\\x\"}",
        b"{\"key\":1,}",
        b"{/**/}",
        b"\0",
    ];
    wrong.extend(others.iter().map(|&text| text.to_vec()));
    for text in wrong {
        let reply = service.post_raw("/v1/leases/claim", text.clone()).await;
        problem(&reply, 400, "invalid_json");
        assert_eq!(reply.body.get("errors"), None, "{:?}", String::from_utf8_lossy(&text));
    }
    lives(&service).await;
}

#[tokio::test]
async fn what_is_json_but_not_an_object_is_refused() {
    let service = start().await;
    for text in ["[]", "null", "1", "\"key\"", "true", "[{\"key\":\"k\"}]"] {
        let reply = service.post_raw("/v1/leases/claim", text).await;
        problem(&reply, 400, "invalid_request");
    }
}

/// Half a surrogate pair is no text.
#[tokio::test]
async fn text_that_is_not_unicode_is_refused() {
    let service = start().await;
    for text in [r"\ud800", r"\udc00", r"\ud800\ud800", r"\udc00\ud800", r"a\ud83d"] {
        for &(path, members) in CALLS {
            for &(name, holds, _, _) in members {
                if holds == Holds::Text {
                    let text = format!("\"{text}\"");
                    let reply = service.post_raw(path, body(members, name, Some(&text))).await;
                    assert_eq!(reply.status, 400, "{path} {name} {reply:#?}");
                }
            }
        }
        let metadata = format!("{{\"a\":\"{text}\"}}");
        let claim = body(CALLS[0].1, "metadata", Some(&metadata));
        assert_eq!(service.post_raw("/v1/leases/claim", claim).await.status, 400);
    }
    let pair = body(CALLS[0].1, "key", Some(r#""\ud83d\ude00""#));
    let granted = service.post_raw("/v1/leases/claim", pair).await.expect("claimed");
    assert_eq!(granted.body["lease"]["key"], "😀");
}

/// Depth and length cost an answer, not the process (`serde-rs/json#162`).
#[tokio::test]
async fn deep_long_and_many_values_are_refused_by_a_service_that_lives_on() {
    let service = start().await;
    for depth in [127, 128, 129, 15_000] {
        let arrays = "[".repeat(depth) + &"]".repeat(depth);
        let objects = "{\"a\":".repeat(depth.min(9_000)) + "1" + &"}".repeat(depth.min(9_000));
        for value in [arrays, objects] {
            for &(path, members) in CALLS {
                for &(name, ..) in members {
                    let reply = service.post_raw(path, body(members, name, Some(&value))).await;
                    assert_eq!(reply.status, 400, "{path} {name} {depth}");
                }
            }
            assert_eq!(service.post_raw("/v1/leases/claim", value).await.status, 400);
        }
    }
    let most = limit(&service, "many_request_body_bytes").await;
    let deep = format!(r#"{{"owner_id":"a","items":{}}}"#, "[".repeat(most - 30));
    problem(&service.post_raw("/v1/leases/renew-many", deep).await, 400, "invalid_json");
    let number = "9".repeat(60_000);
    for number in
        [number.clone(), format!("-{number}"), format!("0.{number}"), format!("1e{number}")]
    {
        let reply =
            service.post_raw("/v1/leases/claim", body(CALLS[0].1, "ttl_ms", Some(&number))).await;
        assert_eq!(reply.status, 400);
    }
    let many: Map<String, Value> = (0..4_000).map(|n| (format!("m{n}"), json!(n))).collect();
    let reply = service.post("/v1/leases/claim", Value::from(many)).await;
    problem(&reply, 400, "invalid_request");
    let errors = reply.body["errors"].as_array().unwrap().len();
    assert!((1..=100).contains(&errors), "{errors} errors in one reply");
    lives(&service).await;
}

#[tokio::test]
async fn only_json_is_read() {
    let service = start().await;
    let text = r#"{"key":"k","owner_id":"a","ttl_ms":30000}"#;
    for media_type in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/jsonp",
        "application/json5",
        "text/json",
        "application",
        "json",
        "*/*",
        "application/problem+json",
        "text/plain; application/json",
        "application/xml",
    ] {
        let request = service.http.post(format!("{}/v1/leases/claim", service.base));
        let response = request.header("content-type", media_type).body(text).send().await.unwrap();
        problem(&read(response).await, 415, "unsupported_media_type");
    }
    let request = service.http.post(format!("{}/v1/leases/claim", service.base)).body(text);
    problem(&read(request.send().await.unwrap()).await, 415, "unsupported_media_type");
    assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
    for (n, media_type) in [
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        " application/json ",
    ]
    .into_iter()
    .enumerate()
    {
        let text = text.replace("\"k\"", &format!("\"k{n}\""));
        let request = service.http.post(format!("{}/v1/leases/claim", service.base));
        let response = request.header("content-type", media_type).body(text).send().await.unwrap();
        read(response).await.expect("claimed");
    }
}

async fn read(response: reqwest::Response) -> Reply {
    let status = response.status().as_u16();
    let headers = response.headers().clone();
    let text = response.text().await.unwrap();
    let body = serde_json::from_str(&text).unwrap_or(Value::Null);
    Reply { status, headers, text, body }
}

/// A body of so many bytes that is a fine request otherwise.
fn padded(text: &str, bytes: usize) -> Vec<u8> {
    let mut body = text.as_bytes().to_vec();
    body.resize(bytes, b' ');
    body
}

/// The documented limit is the real one, whether or not the length is told beforehand.
#[tokio::test]
async fn a_body_is_as_large_as_allowed_and_not_a_byte_larger() {
    let service = start().await;
    let limits = service.get("/v1/capabilities").await.body["limits"].clone();
    let plain = usize::try_from(limits["request_body_bytes"].as_u64().unwrap()).unwrap();
    let many = usize::try_from(limits["many_request_body_bytes"].as_u64().unwrap()).unwrap();
    assert_eq!((plain, many), (64 << 10, 1 << 20));
    for (path, text, most) in [
        ("/v1/leases/claim", r#"{"key":"k","owner_id":"a","ttl_ms":30000}"#, plain),
        ("/v1/leases/wait", r#"{"key":"l","wait_ms":0}"#, plain),
        ("/v1/leases/renew-many", r#"{"owner_id":"a","items":[{"key":"k","version":1}]}"#, many),
    ] {
        for larger in [padded(text, most + 1), padded(text, 2 * most)] {
            for request in [post(path, b"", &larger), post_chunked(path, &larger, 10_000)] {
                let reply = exchange(&service.base, request).await;
                assert_eq!(reply.status, 413, "{path} {}", reply.head);
                let body = reply.json();
                assert_eq!(body["code"], "payload_too_large", "{body}");
                assert_eq!(body["request_id"], reply.header("x-request-id"));
                assert_eq!(reply.header("content-type"), "application/problem+json");
            }
        }
        if path.ends_with("claim") {
            assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
        }
        let fitting = padded(text, most);
        assert_eq!(exchange(&service.base, post(path, b"", &fitting)).await.status, 200, "{path}");
        let chunked = post_chunked(path, &fitting, 999);
        assert_eq!(exchange(&service.base, chunked).await.status, 200, "{path}");
    }
}

/// A client learns from the problem how large its request may be.
#[tokio::test]
async fn a_body_that_is_too_large_is_told_the_limit_by_its_name() {
    let service = start().await;
    for (path, limit_name) in [
        ("/v1/leases/claim", "request_body_bytes"),
        ("/v1/leases/renew-many", "many_request_body_bytes"),
    ] {
        let most = limit(&service, limit_name).await;
        let reply = service.post_raw(path, vec![b' '; most + 1]).await;
        problem(&reply, 413, "payload_too_large");
        let named = reply.body["limit"].as_str().unwrap();
        assert_eq!(limit(&service, named).await, most, "{path} names {named}");
    }
}

/// A client that sends all before it reads learns why it was refused: no reset overtakes the reply.
#[tokio::test]
async fn a_refusal_reaches_those_who_are_still_sending() {
    let service = start().await;
    let body = vec![b' '; 16 << 20];
    for (path, status) in [("/v1/leases/claim", 413), ("/nowhere", 404)] {
        for request in [post(path, b"", &body), post_chunked(path, &body, 1 << 20)] {
            let mut wire = Wire::connect(&service.base).await;
            wire.0.write_all(&request).await.expect("all is taken");
            let reply = wire.reply().await;
            assert_eq!(reply.status, status, "{path} {}", reply.head);
            assert_eq!(reply.json()["status"], status, "{path}");
        }
    }
}

/// A connection that is closed on a client is not kept for it for long.
#[tokio::test]
async fn who_sends_on_after_a_refusal_is_cut_off() {
    let service = start().await;
    let mut wire = Wire::connect(&service.base).await;
    let more = "content-type: application/json\r\ncontent-length: 9000000000\r\n";
    wire.send(head("POST", "/v1/leases/claim", more)).await;
    let read = wire.until("\r\n\r\n").await;
    assert!(read.starts_with("HTTP/1.1 413 "), "{read}");
    let mut pace = interval(Duration::from_millis(50));
    let sending = async {
        while wire.0.write_all(b" ").await.is_ok() {
            pace.tick().await;
        }
    };
    timeout(Duration::from_secs(30), sending).await.expect("it is cut off");
    lives(&service).await;
}

/// Neither an idle connection nor one that is being closed holds up the end of the service.
#[tokio::test]
async fn who_keeps_a_connection_open_does_not_hold_up_the_end() {
    let service = start().await;
    let mut idle = Wire::connect(&service.base).await;
    idle.send("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    idle.until("\r\n\r\n").await;
    let mut refused = Wire::connect(&service.base).await;
    let more = "content-type: application/json\r\ncontent-length: 9000000000\r\n";
    refused.send(head("POST", "/v1/leases/claim", more)).await;
    refused.until("\r\n\r\n").await;
    // A second less than it takes to give up on such a client.
    timeout(Duration::from_secs(4), service.stop()).await.expect("an end");
}

/// A body whose end is far off is refused when it is too large, not when it ends.
#[tokio::test]
async fn a_body_without_end_is_refused() {
    let service = start().await;
    let mut wire = Wire::connect(&service.base).await;
    let more = "content-type: application/json\r\ntransfer-encoding: chunked\r\n";
    wire.send(head("POST", "/v1/leases/claim", more)).await;
    for _ in 0..9 {
        wire.send(format!("2000\r\n{}\r\n", " ".repeat(0x2000))).await;
    }
    let read = wire.until("\r\n\r\n").await;
    assert!(read.starts_with("HTTP/1.1 413 "), "{read}");
    lives(&service).await;
}

#[tokio::test]
async fn a_body_that_breaks_off_changes_nothing() {
    let service = start().await;
    let text = br#"{"key":"k","owner_id":"a","ttl_ms":30000}"#;
    let whole = post("/v1/leases/claim", b"", text);
    let mut wire = Wire::connect(&service.base).await;
    wire.send(&whole[..whole.len() - 1]).await;
    drop(wire);
    lives(&service).await;
    assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
}

#[tokio::test]
async fn what_is_not_there_is_a_problem() {
    let service = start().await;
    for path in [
        "/",
        "/v1",
        "/v1/",
        "/v2/leases",
        "/v1/leases/k",
        "/v1/lease/claim",
        "/favicon.ico",
        "/v1/leases/claim.json",
        "/robots.txt",
        "/docs/no-such-file",
    ] {
        problem(&service.get(path).await, 404, "route_not_found");
        if !path.starts_with("/docs") {
            let body = json!({"key": "k", "owner_id": "a", "ttl_ms": 30_000});
            problem(&service.post(path, body).await, 404, "route_not_found");
        }
    }
}

/// No way of writing a path reaches another route than the one that it names
/// (`getsentry/sentry-mcp#1218`).
#[tokio::test]
async fn paths_are_taken_as_they_stand() {
    let service = start().await;
    for target in [
        "/v1/leases/%2e%2e",
        "/v1/leases/..",
        "/v1/leases/.",
        "/v1/leases/...",
        "//v1/leases",
        "/v1//leases",
        "/v1/leases/",
        "/v1/leases//",
        "/v1/leases/state/",
        "/v1/./leases",
        "/v1/x/../leases",
        "/v1/x/%2e%2e/leases",
        "/v1%2Fleases",
        "/v1/leases%2Fstate?key=k",
        "/V1/leases",
        "/v1/LEASES",
        "/v1/leases%00",
        "/v1/leases%20",
        "/v1/leases;a=b",
        "/v1\\leases",
        "/%76%32/leases",
        "/docs/../metrics",
        "/docs/%2e%2e/metrics",
        "/docs/..%2fmetrics",
        "/docs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/docs//etc/passwd",
        "/docs/%2fetc%2fpasswd",
        "/metrics/",
        "/livez/",
        "/livez%2e",
    ] {
        let reply = exchange(&service.base, head("GET", target, "")).await;
        assert_eq!(reply.status, 404, "{target}: {}", reply.head);
        assert_eq!(reply.json()["code"], "route_not_found", "{target}");
        assert_eq!(reply.header("content-type"), "application/problem+json", "{target}");
    }
    for target in ["/v1/leases/claim/", "/v1/leases/%2e%2e/leases/claim", "//v1/leases/claim"] {
        let body = br#"{"key":"k","owner_id":"a","ttl_ms":30000}"#;
        assert_eq!(exchange(&service.base, post(target, b"", body)).await.status, 404, "{target}");
    }
    assert_eq!(service.state("k").await, json!({"key": "k", "state": "free"}));
}

#[tokio::test]
async fn a_path_with_another_method_is_a_problem_that_names_the_right_one() {
    let service = start().await;
    let methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"];
    for &(path, _) in CALLS {
        for method in methods.iter().filter(|method| **method != "POST") {
            let reply = send(&service, method, path).await;
            problem(&reply, 405, "method_not_allowed");
            assert_eq!(header(&reply, "allow"), "POST", "{method} {path}");
        }
    }
    for path in GETS {
        for method in methods.iter().filter(|method| **method != "GET") {
            let reply = send(&service, method, path).await;
            problem(&reply, 405, "method_not_allowed");
            assert!(header(&reply, "allow").split(',').any(|name| name.trim() == "GET"), "{path}");
        }
    }
}

async fn send(client: &Client, method: &str, path: &str) -> Reply {
    let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
    let request = client.http.request(method, format!("{}{path}", client.base));
    read(request.send().await.unwrap()).await
}

#[tokio::test]
async fn head_tells_what_get_would_without_the_body() {
    let service = start().await;
    for path in GETS {
        let (full, bare) = (service.get(path).await, send(&service, "HEAD", path).await);
        assert_eq!((bare.status, bare.text.as_str()), (full.status, ""), "{path}");
        assert_eq!(header(&bare, "content-type"), header(&full, "content-type"), "{path}");
    }
    for (path, status) in [("/v1/leases/claim", 405), ("/nowhere", 404)] {
        let reply = send(&service, "HEAD", path).await;
        assert_eq!((reply.status, reply.text.as_str()), (status, ""), "{path}");
        assert_eq!(header(&reply, "content-type"), "application/problem+json", "{path}");
    }
}

/// A page of another site cannot have a browser claim keys on the loopback: no reply allows it.
#[tokio::test]
async fn no_reply_lets_pages_of_other_sites_in() {
    let service = start().await;
    for (method, path) in
        [("OPTIONS", "/v1/leases/claim"), ("GET", "/v1/leases"), ("OPTIONS", "/v1/leases")]
    {
        let request =
            service.http.request(method.parse().unwrap(), format!("{}{path}", service.base));
        let request = request
            .header("origin", "http://evil.example")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "content-type");
        let reply = read(request.send().await.unwrap()).await;
        let allowed = reply.headers.keys().find(|name| name.as_str().starts_with("access-control"));
        assert_eq!(allowed, None);
    }
}

#[tokio::test]
async fn every_reply_has_a_request_id_and_is_not_to_be_stored() {
    let service = start().await;
    let mut replies = Vec::new();
    for path in GETS {
        replies.push(service.get(path).await);
    }
    replies.push(service.claim("k", "a", 30_000).await);
    replies.push(service.claim("k", "a", 0).await);
    replies.push(service.renew("k", "a", 1).await);
    replies.push(service.get("/nowhere").await);
    replies.push(send(&service, "PUT", "/v1/leases").await);
    replies.push(send(&service, "HEAD", "/v1/leases").await);
    replies.push(send(&service, "POST", "/v1/leases/claim").await);
    replies.push(service.post_raw("/v1/leases/claim", vec![b' '; 70_000]).await);
    let mut seen = HashSet::new();
    for reply in &replies {
        assert_eq!(header(reply, "cache-control"), "no-store", "{reply:#?}");
        let id = header(reply, "x-request-id");
        let id: uuid::Uuid = id.parse().unwrap_or_else(|_| panic!("{reply:#?}"));
        assert_eq!(id.get_version_num(), 7);
        assert!(seen.insert(id), "given twice: {id}");
    }
}

#[tokio::test]
async fn a_fitting_request_id_is_taken_over_and_any_other_replaced() {
    let service = start().await;
    let longest = "x".repeat(128);
    for id in ["1", "a-b_c.d/e:f", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", &*longest] {
        for path in ["/v1/leases", "/nowhere"] {
            let request = service.http.get(format!("{}{path}", service.base));
            let reply = read(request.header("x-request-id", id).send().await.unwrap()).await;
            assert_eq!(header(&reply, "x-request-id"), id);
            if reply.status != 200 {
                assert_eq!(reply.body["request_id"], id);
            }
        }
    }
    for id in ["", "a b", "a\tb", &*"x".repeat(129), &*"x".repeat(5_000)] {
        let request = service.http.get(format!("{}/nowhere", service.base));
        let reply = read(request.header("x-request-id", id).send().await.unwrap()).await;
        problem(&reply, 404, "route_not_found");
        assert_ne!(header(&reply, "x-request-id"), id);
        assert!(header(&reply, "x-request-id").parse::<uuid::Uuid>().is_ok());
    }
}

/// What is told of a request by its id must be found by it.
#[tokio::test]
async fn each_request_has_one_line_in_the_log_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let arguments = ["--log", "fencepost=debug", "--log-format", "json"];
    let stderr = std::fs::File::create(&log).unwrap().into();
    let mut process = Process::start_with_log("memory:", &arguments, stderr);
    let trace_id = "0af7651916cd43dd8448eb211c80319c";
    for (path, status) in [("/v1/leases/state?key=k", 200), ("/nowhere", 404)] {
        let request = process
            .http
            .get(format!("{}{path}", process.base))
            .header("x-request-id", path)
            .header("traceparent", format!("00-{trace_id}-b7ad6b7169203331-01"));
        assert_eq!(request.send().await.unwrap().status(), status);
    }
    process.signal("TERM");
    assert!(process.wait().success());
    let text = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (id, route, status) in
        [("/v1/leases/state?key=k", "/v1/leases/state", 200), ("/nowhere", "other", 404)]
    {
        let named: Vec<&Value> = lines.iter().filter(|line| line["request_id"] == id).collect();
        let [line] = named[..] else { panic!("{id}: {text}") };
        assert_eq!((&line["level"], &line["method"]), (&json!("DEBUG"), &json!("GET")));
        assert_eq!((&line["route"], &line["status"]), (&json!(route), &json!(status)));
        assert_eq!(line["trace_id"], trace_id);
        assert!(line["millis"].is_u64() || line["millis"].is_i64(), "{line}");
    }
}

#[tokio::test]
async fn a_bug_is_answered_without_its_details_and_the_connection_goes_on() {
    let options = CoordinatorOptions::default();
    let metrics = Arc::clone(&options.metrics);
    let coordinator = Coordinator::open("memory:", options).await.unwrap();
    let panics: Rival = Arc::new(|_, _, _| panic!("a secret"));
    let service = Service::with_rivals(coordinator, metrics, vec![("/panics", panics)]).await;
    for _ in 0..2 {
        let reply =
            service.post("/panics", json!({"key": "k", "owner_id": "a", "ttl_ms": 60_000})).await;
        problem(&reply, 500, "internal");
        assert!(!reply.text.contains("secret"), "{reply:#?}");
    }
    service.claim("k", "a", 60_000).await.expect("claimed");
    service.stop().await;
}

/// Bytes beyond ASCII in a header are refused or replaced; they bring nothing down
/// (`http-rs/tide#853`, `hyperium/http#860`).
#[tokio::test]
async fn odd_bytes_in_headers_are_survived() {
    let service = start().await;
    let values: [&[u8]; 9] =
        [b"\xc3\xa9", b"\xe9", b"\xff", "😀".as_bytes(), b"\x7f", b"a\tb", b"\x01", b"\0", b"\x80"];
    for value in values {
        for name in ["x-request-id", "traceparent", "x-other", "accept", "origin", "cookie"] {
            let mut more = format!("{name}: ").into_bytes();
            more.extend_from_slice(value);
            more.extend_from_slice(b"\r\n");
            let text = br#"{"key":"k","wait_ms":0}"#;
            let reply = exchange(&service.base, post("/v1/leases/wait", &more, text)).await;
            assert!(matches!(reply.status, 200 | 400), "{name} {value:?}: {}", reply.head);
            if reply.status == 200 {
                let id = reply.header("x-request-id");
                assert!(id.parse::<uuid::Uuid>().is_ok(), "{name} {value:?}: {id}");
            }
        }
        let mut more = b"content-type: application/json".to_vec();
        more.extend_from_slice(value);
        let mut request = head("POST", "/v1/leases/wait", "content-length: 2\r\n").into_bytes();
        request.truncate(request.len() - 2);
        request.extend_from_slice(&more);
        request.extend_from_slice(b"\r\n\r\n{}");
        let reply = exchange(&service.base, request).await;
        assert!(matches!(reply.status, 400 | 415), "{value:?}: {}", reply.head);
    }
    lives(&service).await;
}

#[tokio::test]
async fn what_is_not_http_is_survived() {
    let service = start().await;
    let long = "a".repeat(200_000);
    for request in [
        "\r\n\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "hello\r\n\r\n".to_owned(),
        "GET /livez HTTP/9.9\r\n\r\n".to_owned(),
        "GET /livez HTTP/1.1\r\nno colon\r\n\r\n".to_owned(),
        "\u{16}\u{3}\u{1}\u{2}".to_owned() + &"\0".repeat(200),
        format!("GET /{long} HTTP/1.1\r\nhost: a\r\n\r\n"),
        head("GET", "/livez", &format!("x-long: {long}{long}{long}\r\n")),
        head("POST", "/v1/leases/claim", "content-length: -1\r\n"),
        head("POST", "/v1/leases/claim", "content-length: 1\r\ncontent-length: 2\r\n") + "{}",
        head("POST", "/v1/leases/claim", "content-length: 99999999999999999999\r\n"),
        head("POST", "/v1/leases/claim", "transfer-encoding: gzip\r\n"),
        head(
            "POST",
            "/v1/leases/claim",
            "content-type: application/json\r\ntransfer-encoding: chunked\r\n",
        ) + "zz\r\n",
    ] {
        let mut wire = Wire::connect(&service.base).await;
        wire.send(&request).await;
        // Whoever waits for more of it gets no more.
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut wire.0).await;
        let reply = wire.reply().await;
        assert!(
            reply.status == 0 || (400..=505).contains(&reply.status) && reply.status != 500,
            "{:.80}: {}",
            request,
            reply.head
        );
    }
    lives(&service).await;
}

#[tokio::test]
async fn a_client_may_ask_before_it_sends_the_body() {
    let service = start().await;
    let text = r#"{"key":"k","owner_id":"a","ttl_ms":30000}"#;
    let more = format!(
        "content-type: application/json\r\ncontent-length: {}\r\nexpect: 100-continue\r\n",
        text.len()
    );
    let mut wire = Wire::connect(&service.base).await;
    wire.send(head("POST", "/v1/leases/claim", &more)).await;
    assert!(wire.until("\r\n\r\n").await.starts_with("HTTP/1.1 100 "));
    wire.send(text).await;
    let reply = wire.reply().await;
    assert_eq!((reply.status, &reply.json()["outcome"]), (200, &json!("claimed")));
}

#[tokio::test]
async fn requests_may_follow_each_other_without_waiting() {
    let service = start().await;
    let claim = post("/v1/leases/claim", b"", br#"{"key":"k","owner_id":"a","ttl_ms":30000}"#);
    let claim = String::from_utf8(claim).unwrap().replace("connection: close\r\n", "");
    let mut wire = Wire::connect(&service.base).await;
    wire.send(format!("{claim}{claim}{}", head("GET", "/livez", ""))).await;
    let (first, second) = (wire.until("}").await, wire.until("\"held\"").await);
    assert!(first.contains("\"claimed\""), "{first}");
    assert!(second.contains("HTTP/1.1 200 "), "{second}");
    wire.until("alive").await;
}

#[tokio::test]
async fn old_clients_and_whole_addresses_are_served() {
    let service = start().await;
    let reply = exchange(&service.base, "GET /livez HTTP/1.0\r\n\r\n").await;
    assert_eq!(reply.status, 200);
    let reply = exchange(&service.base, head("GET", "http://localhost/livez", "")).await;
    assert_eq!(reply.status, 200);
}

/// Results begin with the outcome and have no white space, so that people can read them in logs.
#[tokio::test]
async fn results_are_compact_begin_with_the_outcome_and_have_no_nulls() {
    let service = start().await;
    let granted = service.claim("k", "a", 60_000).await;
    let version = granted.version();
    let short = service.claim("short", "a", BRIEF).await;
    until_lapsed(&service, "short").await;
    let body = json!({"key": "k", "version": version});
    let replies = [
        granted,
        short,
        service.claim("short", "b", 60_000).await,
        service.claim("k", "b", 60_000).await,
        service.renew("k", "a", version).await,
        service.wait("k", None, 0).await,
        service.wait("free", None, 0).await,
        service.post("/v1/leases/verify", body.clone()).await,
        service.post("/v1/leases/verify", json!({"key": "k", "version": 1})).await,
        service.release("k", "a", version).await,
        service.post("/v1/leases/verify", body).await,
        force(&service, "short", None).await,
        force(&service, "short", None).await,
    ];
    for reply in &replies {
        assert_eq!(reply.status, 200, "{reply:#?}");
        assert_eq!(header(reply, "content-type"), "application/json");
        assert!(reply.text.starts_with("{\"outcome\":\""), "{}", reply.text);
        assert!(!reply.text.contains(['\n', ' ']), "{}", reply.text);
        no_nulls(&reply.body);
    }
    for path in ["/v1/leases", "/v1/leases/state?key=k", "/v1/capabilities", "/livez", "/readyz"] {
        let reply = service.get(path).await;
        no_nulls(&reply.body);
        assert!(!reply.text.contains('\n'), "{}", reply.text);
    }
}
