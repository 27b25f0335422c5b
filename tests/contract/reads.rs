//! Looking without changing: `verify`, `state` and lists.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::check::{BRIEF, force, header, limit, no_nulls, problem, until_lapsed, wrong_members};
use crate::on_every_store;
use crate::support::{Client, Reply};

async fn verify(client: &Client, key: &str, version: i64) -> Reply {
    client.post("/v1/leases/verify", json!({"key": key, "version": version})).await
}

/// Keys that some part on the way might take for something else.
pub(crate) const ODD_KEYS: &[&str] = &[
    "%",
    "%%",
    "%25",
    "%2F",
    "%2f",
    "%252F",
    "a%b",
    "a_b",
    "_",
    "__",
    "\\",
    "a\\b",
    "\\%",
    "\\_",
    "'",
    "''",
    "'; DROP TABLE leases; --",
    "\"",
    "\"k\"",
    "a/b",
    "a%2Fb",
    "/",
    "//",
    ".",
    "..",
    "...",
    "a+b",
    "a b",
    " ",
    "  ",
    "a;b=c",
    "a?b",
    "a#b",
    "a&key=b",
    ":x",
    "*",
    "{x}",
    "{*x}",
    "$1",
    "?1",
    "null",
    "true",
    "1",
    "1.0",
    "[]",
    "{}",
    "key",
    "\u{80}",
    "\u{a0}",
    "é",
    "e\u{301}",
    "ß",
    "ẞ",
    "İ",
    "ı",
    "😀",
    "👩‍👩‍👧",
    "\u{202e}abc",
    "\u{200b}",
    "\u{feff}",
    "\u{2028}",
    "\u{fffd}",
    "\u{ffff}",
    "\u{10ffff}",
];

/// All keys of a list, page by page, as they came.
async fn all(client: &Client, query: &[(&str, &str)]) -> Vec<String> {
    let mut keys = Vec::new();
    let mut token: Option<String> = None;
    loop {
        let mut query = query.to_vec();
        query.extend(token.as_deref().map(|token| ("page_token", token)));
        let page = client.get_with("/v1/leases", &query).await;
        assert_eq!(page.status, 200, "{page:#?}");
        no_nulls(&page.body);
        let items = page.body["items"].as_array().unwrap();
        keys.extend(items.iter().map(|item| item["key"].as_str().unwrap().to_owned()));
        token = page.body.get("next_page_token").map(|token| token.as_str().unwrap().to_owned());
        if token.is_none() {
            return keys;
        }
    }
}

/// Claims keys, many at a time.
async fn claim_all(client: &Client, keys: &[String]) {
    for chunk in keys.chunks(50) {
        let claims = chunk.iter().map(|key| {
            let (client, key) = (client.clone(), key.clone());
            tokio::spawn(async move { client.claim(&key, "a", 60_000).await.expect("claimed") })
        });
        for claim in claims.collect::<Vec<_>>() {
            claim.await.unwrap();
        }
    }
}

on_every_store! {
    async fn the_version_that_holds_the_key_is_current(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        let reply = verify(&service, "k", first).await.expect("current");
        assert_eq!(reply.body, json!({"outcome": "current"}));
        service.renew("k", "a", first).await.expect("renewed");
        verify(&service, "k", first).await.expect("current");
    }

    async fn any_other_version_is_stale(service) {
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        for version in [1, first - 1, first + 1, (1 << 53) - 1] {
            let reply = verify(&service, "k", version).await.expect("stale");
            assert_eq!(reply.body, json!({"outcome": "stale", "current_version": first}));
        }
        verify(&service, "K", first).await.expect("stale");
    }

    async fn no_version_of_a_free_key_is_current(service) {
        let stale = json!({"outcome": "stale"});
        assert_eq!(verify(&service, "never", 1).await.body, stale);
        let released = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.release("k", "a", released).await.expect("released");
        assert_eq!(verify(&service, "k", released).await.body, stale);
        let revoked = service.claim("k", "a", 60_000).await.expect("claimed").version();
        force(&service, "k", None).await.expect("released");
        assert_eq!(verify(&service, "k", revoked).await.body, stale);
        let lapsed = service.claim("k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        assert_eq!(verify(&service, "k", lapsed).await.body, stale);
    }

    async fn a_key_that_nobody_claimed_is_free(service) {
        let reply = service.get_with("/v1/leases/state", &[("key", "never")]).await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.body, json!({"key": "never", "state": "free"}));
        assert_eq!(header(&reply, "cache-control"), "no-store");
        assert_eq!(header(&reply, "content-type"), "application/json");
    }

    async fn a_held_key_shows_its_holder(service) {
        let granted = service.claim("k", "a", 60_000).await.expect("claimed");
        let state = service.state("k").await;
        no_nulls(&state);
        let mut names: Vec<&str> =
            state.as_object().unwrap().keys().map(|name| &**name).collect();
        names.sort_unstable();
        assert_eq!(names, ["acquired_at", "expires_at", "expires_in_ms", "key", "owner_id",
                           "state", "version"]);
        assert_eq!(state["state"], "held");
        for name in ["key", "owner_id", "version", "acquired_at", "expires_at"] {
            assert_eq!(state[name], granted.body["lease"][name], "{name}");
        }
        assert!((1..=60_000).contains(&state["expires_in_ms"].as_i64().unwrap()));
    }

    /// However it ended, and whether or not anybody was told.
    async fn a_free_key_shows_its_last_version_only(service) {
        let free = |version: i64| json!({"key": "k", "state": "free", "version": version});
        let first = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.release("k", "a", first).await.expect("released");
        assert_eq!(service.state("k").await, free(first));
        let second = service.claim("k", "a", 60_000).await.expect("claimed").version();
        force(&service, "k", None).await.expect("released");
        assert_eq!(service.state("k").await, free(second));
        let third = service.claim("k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        assert_eq!(service.state("k").await, free(third));
        service.until_expired("k", third).await;
        assert_eq!(service.state("k").await, free(third));
        let list = service.get("/v1/leases").await;
        assert_eq!(list.body, json!({"items": [free(third)]}));
    }

    async fn a_list_of_nothing_is_empty(service) {
        assert_eq!(service.get("/v1/leases").await.body, json!({"items": []}));
        let none = service.get_with("/v1/leases", &[("prefix", "x"), ("state", "held")]).await;
        assert_eq!(none.body, json!({"items": []}));
    }

    async fn a_list_shows_each_key_as_state_does(service) {
        let held = json!({"key": "held", "owner_id": "a", "ttl_ms": 60_000, "metadata": {"a": "b"}});
        service.post("/v1/leases/claim", held).await.expect("claimed");
        let freed = service.claim("freed", "a", 60_000).await.expect("claimed").version();
        service.release("freed", "a", freed).await.expect("released");
        let mut list = service.get("/v1/leases").await.body;
        let mut states = json!([service.state("freed").await, service.state("held").await]);
        for items in [&mut list["items"], &mut states] {
            items[1].as_object_mut().unwrap().remove("expires_in_ms").unwrap();
        }
        assert_eq!(list["items"], states);
    }

    async fn odd_keys_are_kept_apart_and_listed_in_the_order_of_their_bytes(service) {
        let keys: Vec<String> = ODD_KEYS.iter().map(|&key| key.to_owned()).collect();
        claim_all(&service, &keys).await;
        let mut sorted = keys.clone();
        sorted.sort_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
        sorted.dedup();
        assert_eq!(sorted.len(), keys.len());
        for page in ["1000", "1", "7"] {
            assert_eq!(all(&service, &[("limit", page)]).await, sorted, "{page} at a time");
        }
        for key in &keys {
            let state = service.state(key).await;
            assert_eq!((state["key"].as_str(), &state["state"]), (Some(&**key), &json!("held")));
        }
    }

    async fn a_prefix_is_taken_literally(service) {
        let mut keys: Vec<String> = ODD_KEYS.iter().map(|&key| key.to_owned()).collect();
        keys.extend(["k", "ka", "kab", "k_b", "k%", "K", "Ka", "l"].map(str::to_owned));
        claim_all(&service, &keys).await;
        keys.sort();
        let prefixes =
            ["", "k", "ka", "K", "%", "_", "\\", "'", "\"", "a", "a%", ".", " ", "é", "e", "😀",
             "\u{10ffff}", "no such", "kab", "kabc"];
        for prefix in prefixes {
            let expected: Vec<&String> =
                keys.iter().filter(|key| key.starts_with(prefix)).collect();
            let found = all(&service, &[("prefix", prefix), ("limit", "3")]).await;
            assert_eq!(found.iter().collect::<Vec<_>>(), expected, "{prefix}");
        }
    }

    async fn lists_are_filtered_by_state(service) {
        let keys: Vec<String> = (0..20).map(|n| format!("k{n:02}")).collect();
        claim_all(&service, &keys).await;
        let mut held: BTreeSet<String> = keys.iter().cloned().collect();
        let mut free = BTreeSet::new();
        for key in keys.iter().step_by(3) {
            force(&service, key, None).await.expect("released");
            held.remove(key);
            free.insert(key.clone());
        }
        service.claim("lapsed", "a", BRIEF).await.expect("claimed");
        until_lapsed(&service, "lapsed").await;
        free.insert("lapsed".to_owned());
        for limit in ["1", "5", "1000"] {
            let found = |state| {
                let client = &service.client;
                async move { all(client, &[("state", state), ("limit", limit)]).await }
            };
            assert!(found("held").await.iter().eq(held.iter()));
            assert!(found("free").await.iter().eq(free.iter()));
        }
    }

    async fn a_list_of_more_keys_than_a_page_holds_goes_on(service) {
        let most = limit(&service, "list_limit").await;
        let keys: Vec<String> = (0..most + 60).map(|n| format!("k{n:05}")).collect();
        claim_all(&service, &keys).await;
        let most = most.to_string();
        let page = service.get_with("/v1/leases", &[("limit", &*most)]).await;
        assert_eq!(page.body["items"].as_array().unwrap().len().to_string(), most);
        assert_eq!(all(&service, &[("limit", &*most)]).await, keys);
        let page = service.get("/v1/leases").await;
        assert_eq!(page.body["items"].as_array().unwrap().len(), 100);
        // What is looked for may lie behind more keys than one page looks at.
        let last = keys.last().unwrap();
        force(&service, last, None).await.expect("released");
        assert_eq!(all(&service, &[("state", "free")]).await, [&**last]);
    }

    async fn a_page_goes_on_after_keys_that_came_and_went(service) {
        let keys: Vec<String> = ["b", "d", "f"].map(str::to_owned).into();
        claim_all(&service, &keys).await;
        let page = service.get("/v1/leases?limit=2").await;
        let token = page.body["next_page_token"].as_str().unwrap();
        claim_all(&service, &["a".to_owned(), "c".to_owned(), "e".to_owned()]).await;
        let rest = all(&service, &[("page_token", token)]).await;
        assert_eq!(rest, ["e", "f"]);
    }

    async fn a_page_token_goes_with_another_limit_and_prefix(service) {
        let keys: Vec<String> = ["a1", "a2", "b1", "b2"].map(str::to_owned).into();
        claim_all(&service, &keys).await;
        let page = service.get("/v1/leases?limit=1").await;
        let token = page.body["next_page_token"].as_str().unwrap();
        assert_eq!(all(&service, &[("page_token", token), ("limit", "1000")]).await, keys[1..]);
        assert_eq!(all(&service, &[("page_token", token), ("prefix", "b")]).await, keys[2..]);
        let page = service.get("/v1/leases?limit=3").await;
        let token = page.body["next_page_token"].as_str().unwrap();
        assert!(all(&service, &[("page_token", token), ("prefix", "a")]).await.is_empty());
    }

    async fn queries_that_are_wrong_are_refused_by_name(service) {
        for (query, names) in [
            ("state", vec!["key"]),
            ("state?key=", vec!["key"]),
            ("state?key=%00", vec!["key"]),
            ("state?key=a%1f", vec!["key"]),
            ("state?key=a%7F", vec!["key"]),
            ("state?key=a&key=a", vec!["key"]),
            ("state?key=a&Key=a", vec!["Key"]),
            ("state?key=a&other", vec!["other"]),
            ("state?key=a&version=1", vec!["version"]),
            ("?limit=0", vec!["limit"]),
            ("?limit=1001", vec!["limit"]),
            ("?limit=-1", vec!["limit"]),
            ("?limit=1.0", vec!["limit"]),
            ("?limit=1e1", vec!["limit"]),
            ("?limit=ten", vec!["limit"]),
            ("?limit=", vec!["limit"]),
            ("?limit=5&limit=5", vec!["limit"]),
            ("?state=HELD", vec!["state"]),
            ("?state=expired", vec!["state"]),
            ("?state=", vec!["state"]),
            ("?page_token=%25", vec!["page_token"]),
            ("?page_token=AA", vec!["page_token"]),
            ("?page_token=", vec!["page_token"]),
            ("?key=a", vec!["key"]),
            ("?cursor=a&offset=1", vec!["cursor", "offset"]),
        ] {
            let path = if query.starts_with('?') { "/v1/leases" } else { "/v1/leases/" };
            let reply = service.get(&format!("{path}{query}")).await;
            assert_eq!(wrong_members(&reply), names, "{query}");
        }
    }

    /// A character that keys cannot have is refused in a prefix, or found nowhere; no store fails
    /// on it (`apache/incubator-devlake#3564`).
    async fn a_prefix_that_no_key_has_fails_nowhere(service) {
        service.claim("k", "a", 60_000).await.expect("claimed");
        let long = "k".repeat(10_000);
        for prefix in ["%00", "k%00", "%7f", "%01", &long] {
            let reply = service.get(&format!("/v1/leases?prefix={prefix}")).await;
            if reply.status == 200 {
                assert_eq!(reply.body, json!({"items": []}));
            } else {
                assert_eq!(wrong_members(&reply), ["prefix"]);
            }
        }
    }

    /// Bytes that are no text must not be taken for another key.
    async fn a_query_that_is_not_utf_8_is_refused(service) {
        service.claim("\u{fffd}", "a", 60_000).await.expect("claimed");
        for path in ["/v1/leases/state?key=%FF", "/v1/leases/state?key=%C3%28"] {
            let reply = service.get(path).await;
            assert_eq!(reply.status, 400, "{reply:#?}");
        }
        let reply = service.get("/v1/leases?prefix=%FF").await;
        assert_eq!(reply.status, 400, "{reply:#?}");
    }
}

#[tokio::test]
async fn reads_answer_while_the_replica_drains() {
    let service = crate::support::Service::start(crate::support::Kind::Memory).await;
    let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
    service.app.coordinator.drain();
    assert_eq!(service.state("k").await["version"], held);
    verify(&service, "k", held).await.expect("current");
    assert_eq!(service.get("/v1/leases").await.body["items"].as_array().map(Vec::len), Some(1));
    problem(&service.get("/readyz").await, 503, "shutting_down");
    assert_eq!(service.get("/livez").await.status, 200);
    let _: Value = service.get("/v1/capabilities").await.body;
}
