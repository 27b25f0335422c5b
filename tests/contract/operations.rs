//! Health, limits, figures and the published documents.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::check::{force, header, no_nulls, problem};
use crate::on_every_store;
use crate::support::{Client, Kind, Reply, Service, eventually};

on_every_store! {
    async fn a_service_that_can_work_is_ready_and_says_on_what(service) {
        let (store, wake_path) = match service.world().kind {
            Kind::Memory => ("memory", "local"),
            Kind::Sqlite => ("sqlite", "local"),
            Kind::Postgres => ("postgres", "listen"),
        };
        let ready = json!({"status": "ready", "store": store, "wake_path": wake_path});
        // That notifications arrive must be proven first.
        eventually(|| async { service.get("/readyz").await.body == ready }).await;
        assert_eq!(service.get("/readyz").await.status, 200);
        assert_eq!(service.get("/v1/capabilities").await.body["store"], store);
        let listening = f64::from(u8::from(service.world().kind == Kind::Postgres));
        eventually(|| async { service.metric("fencepost_listening").await == listening }).await;
    }

    async fn the_figures_of_a_service_at_work_are_told(service) {
        let held = service.claim("k", "a", 60_000).await.expect("claimed").version();
        service.renew("k", "a", held).await.expect("renewed");
        service.renew("k", "b", held).await.expect_stale("unknown");
        let text = service.get("/metrics").await.text;
        for line in [
            "# TYPE fencepost_http_request_duration_seconds histogram",
            "fencepost_http_request_duration_seconds_count{route=\"/v1/leases/claim\",status=\"200\"} 1",
            "fencepost_http_request_duration_seconds_count{route=\"/v1/leases/renew\",status=\"200\"} 1",
            "fencepost_http_request_duration_seconds_count{route=\"/v1/leases/renew\",status=\"409\"} 1",
            "# TYPE fencepost_batch_commands histogram",
            "# TYPE fencepost_batch_keys histogram",
            "# TYPE fencepost_write_retries counter",
            "# TYPE fencepost_store_call_duration_seconds histogram",
            "# TYPE fencepost_waiters gauge",
            "fencepost_waiters 0",
            "# TYPE fencepost_undone_grants counter",
            "# TYPE fencepost_cleaned_keys counter",
            "# TYPE fencepost_listening gauge",
            "# TYPE fencepost_listener_reconnects counter",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in {text}");
        }
        assert!(service.metric("fencepost_batch_commands_count").await >= 3.0);
        for operation in ["load", "store"] {
            let count = format!("fencepost_store_call_duration_seconds_count{{operation=\"{operation}\"}}");
            assert!(service.metric(&count).await >= 1.0, "{operation}");
        }
        assert_eq!(service.metric("fencepost_write_retries_total").await, 0.0);
        assert_eq!(text.lines().last(), Some("# EOF"));
    }
}

async fn start() -> Service {
    Service::start(Kind::Memory).await
}

#[tokio::test]
async fn a_process_that_lives_says_so() {
    let service = start().await;
    let reply = service.get("/livez").await;
    assert_eq!((reply.status, reply.body), (200, json!({"status": "alive"})));
}

#[tokio::test]
async fn figures_are_in_the_format_that_they_claim() {
    let service = start().await;
    let reply = service.get("/metrics").await;
    let media_type = header(&reply, "content-type");
    assert!(media_type.starts_with("application/openmetrics-text; version=1.0.0"), "{media_type}");
    let mut typed = HashSet::new();
    for line in reply.text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            assert!(typed.insert(rest.split(' ').next().unwrap()), "{line} twice");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(name.starts_with("fencepost_"), "{line}");
        }
    }
}

/// Paths that callers make up do not become labels, of which there would be no end.
#[tokio::test]
async fn figures_name_routes_and_not_what_was_asked_for() {
    let service = start().await;
    service.get("/no/such/path").await;
    service.get("/v1/leases/state?key=secret").await;
    service.get("/docs/index.html").await;
    let text = service.get("/metrics").await.text;
    let routes: BTreeSet<&str> =
        text.lines().filter_map(|line| line.split_once("route=\"")?.1.split('"').next()).collect();
    assert!(routes.contains("/v1/leases/state"), "{routes:?}");
    assert!(routes.contains("other"), "{routes:?}");
    assert!(!text.contains("secret") && !text.contains("/no/such/path"));
}

#[tokio::test]
async fn capabilities_tell_version_resources_and_limits() {
    let service = start().await;
    let reply = service.get("/v1/capabilities").await;
    assert_eq!(reply.status, 200);
    no_nulls(&reply.body);
    assert_eq!(reply.body["version"], env!("CARGO_PKG_VERSION"));
    assert!(reply.body["resources"].as_array().unwrap().contains(&json!("leases")));
    for (name, limit) in [
        ("key_bytes", 512),
        ("owner_id_bytes", 256),
        ("reason_bytes", 512),
        ("metadata_bytes", 4_096),
        ("ttl_ms_min", 100),
        ("ttl_ms_max", 86_400_000),
        ("wait_ms_max", 50_000),
        ("version_max", (1_i64 << 53) - 1),
        ("request_body_bytes", 64 << 10),
        ("many_request_body_bytes", 1 << 20),
        ("many_items", 1_000),
        ("list_limit", 1_000),
        ("request_timeout_ms", 5_000),
    ] {
        assert_eq!(reply.body["limits"][name], limit, "{name}");
    }
    assert_eq!(reply.body["defaults"]["wait_ms"], 20_000);
    assert_eq!(reply.body["defaults"]["list_limit"], 100);
}

#[tokio::test]
async fn reads_take_no_queries_that_they_do_not_know() {
    let service = start().await;
    for path in ["/v1/leases/state?key=k&x=1", "/v1/leases?x=1"] {
        problem(&service.get(path).await, 400, "invalid_request");
    }
    // Probes and scrapers may add what they like, or be refused; they never break anything.
    for path in ["/livez?x=1", "/readyz?x=1", "/metrics?x=1", "/openapi.json?x=1"] {
        assert!(matches!(service.get(path).await.status, 200 | 400), "{path}");
    }
}

fn committed(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Says where two documents part, which a comparison of their whole text would not.
#[track_caller]
fn same(name: &str, committed: &str, made: &str) {
    let parted = committed.lines().zip(made.lines()).enumerate().find(|(_, (a, b))| a != b);
    assert_eq!(parted, None, "openapi/{name} is stale: generate it anew and commit it");
    assert!(committed == made, "openapi/{name} is stale: generate it anew and commit it");
}

#[tokio::test]
async fn the_documents_served_are_those_committed_and_those_generated() {
    let service = start().await;
    let made = fencepost::http::documents();
    for (name, made) in [("openapi.json", &made.v3_1), ("openapi-3.0.json", &made.v3_0)] {
        let served = service.get(&format!("/{name}")).await;
        assert_eq!(served.status, 200);
        assert_eq!(header(&served, "content-type"), "application/json");
        same(name, &served.text, made);
        same(name, &committed(name), made);
    }
}

fn documents() -> [Value; 2] {
    let made = fencepost::http::documents();
    [&made.v3_1, &made.v3_0].map(|text| serde_json::from_str(text).unwrap())
}

/// Calls `visit` with each object in a document and the way to it.
fn walk(value: &Value, path: &str, visit: &mut impl FnMut(&str, &serde_json::Map<String, Value>)) {
    match value {
        Value::Object(members) => {
            visit(path, members);
            for (name, member) in members {
                walk(member, &format!("{path}/{}", name.replace('/', "~1")), visit);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                walk(item, &format!("{path}/{index}"), visit);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Keywords of JSON Schema that OpenAPI 3.0 does not have.
const NOT_IN_3_0: &[&str] = &[
    "examples",
    "propertyNames",
    "patternProperties",
    "const",
    "if",
    "prefixItems",
    "contains",
    "contentEncoding",
    "contentMediaType",
    "unevaluatedProperties",
    "dependentRequired",
    "$defs",
    "$id",
    "$schema",
    "identifier",
    "webhooks",
];

/// What generators of clients stumble over.
#[test]
fn the_documents_have_what_generators_need() {
    for document in documents() {
        let version = document["openapi"].as_str().unwrap();
        let is_3_0 = version == "3.0.3";
        assert!(is_3_0 || version.starts_with("3.1."), "{version}");
        assert_eq!(document["servers"][0]["url"], "/");
        let mut ids = HashSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                let at = format!("{version} {method} {path}");
                let id = operation["operationId"].as_str().unwrap();
                assert!(id.starts_with(|c: char| c.is_ascii_lowercase()), "{at}");
                assert!(id.chars().all(|c| c.is_ascii_alphanumeric()), "{at}");
                assert!(ids.insert(id), "{at}");
                assert_eq!(operation["tags"].as_array().map(Vec::len), Some(1), "{at}");
                for name in ["summary", "description"] {
                    assert!(operation[name].as_str().is_some_and(|text| !text.is_empty()), "{at}");
                }
                for (status, response) in operation["responses"].as_object().unwrap() {
                    assert!(status.parse::<u16>().is_ok(), "{at} {status}");
                    let text = response["description"].as_str();
                    assert!(text.is_some_and(|text| !text.is_empty()), "{at} {status}");
                }
            }
        }
        walk(&document, "", &mut |path, members| {
            let is_example = path.contains("/example");
            for banned in ["oneOf", "anyOf", "discriminator", "nullable", "enum"] {
                assert!(is_example || !members.contains_key(banned), "{version} {path}: {banned}");
            }
            let kind = members.get("type");
            assert!(is_example || !kind.is_some_and(Value::is_array), "{version} {path}");
            let is_named = path.ends_with("/properties") || path.ends_with("/schemas");
            for unknown in NOT_IN_3_0.iter().filter(|_| is_3_0 && !is_example && !is_named) {
                assert!(!members.contains_key(*unknown), "{version} {path}: {unknown}");
            }
            if let Some(reference) = members.get("$ref").and_then(Value::as_str) {
                let pointer = reference.strip_prefix('#').unwrap();
                assert!(document.pointer(pointer).is_some(), "{version} {path}: {reference}");
            }
        });
        for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
            if name.ends_with("Request") {
                assert_eq!(schema["additionalProperties"], false, "{version} {name}");
            } else {
                assert_ne!(schema.get("additionalProperties"), Some(&json!(false)), "{name}");
            }
        }
    }
}

#[tokio::test]
async fn every_path_of_the_document_is_served() {
    let service = start().await;
    let [document, _] = documents();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let method = method.to_uppercase().parse().unwrap();
            let request = service.http.request(method, format!("{}{path}", service.base));
            let status = request.send().await.unwrap().status().as_u16();
            assert!(!matches!(status, 404 | 405), "{path}: {status}");
        }
    }
}

#[test]
fn the_limits_in_the_document_are_those_of_the_service() {
    let [document, _] = documents();
    let schemas = &document["components"]["schemas"];
    let claim = &schemas["ClaimLeaseRequest"]["properties"];
    assert_eq!(claim["key"]["maxLength"], 512);
    assert_eq!(claim["owner_id"]["maxLength"], 256);
    assert_eq!(claim["ttl_ms"]["minimum"], 100);
    assert_eq!(claim["ttl_ms"]["maximum"], 86_400_000);
    assert_eq!(claim["wait_ms"]["maximum"], 50_000);
    assert_eq!(schemas["RenewManyLeasesRequest"]["properties"]["items"]["maxItems"], 1_000);
    assert_eq!(schemas["RenewLeaseRequest"]["properties"]["version"]["maximum"], (1_i64 << 53) - 1);
    let required = |name: &str| -> Vec<String> {
        serde_json::from_value(schemas[name]["required"].clone()).unwrap()
    };
    assert_eq!(required("ClaimLeaseRequest"), ["key", "owner_id", "ttl_ms"]);
    assert_eq!(required("RenewLeaseRequest"), ["key", "owner_id", "version"]);
    assert_eq!(required("WaitForLeaseRequest"), ["key"]);
    assert_eq!(required("ForceReleaseLeaseRequest"), ["key", "reason"]);
}

/// What in `value` is not as `schema` says.
fn misfits(document: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let schema = document.pointer(reference.strip_prefix('#').unwrap()).unwrap();
        return misfits(document, schema, value, at);
    }
    let mut found = Vec::new();
    for part in schema.get("allOf").and_then(Value::as_array).into_iter().flatten() {
        found.extend(misfits(document, part, value, at));
    }
    let is_of_type = match schema.get("type").and_then(Value::as_str) {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        _ => true,
    };
    if !is_of_type {
        found.push(format!("{at}: {value} is of another type than {schema}"));
    }
    if let (Some(least), Some(number)) = (schema["minimum"].as_i64(), value.as_i64()) {
        found.extend((number < least).then(|| format!("{at}: {number} < {least}")));
    }
    if let (Some(most), Some(number)) = (schema["maximum"].as_i64(), value.as_i64()) {
        found.extend((number > most).then(|| format!("{at}: {number} > {most}")));
    }
    for item in value.as_array().into_iter().flatten() {
        found.extend(misfits(document, &schema["items"], item, &format!("{at}[]")));
    }
    let Some(members) = value.as_object() else { return found };
    for name in schema["required"].as_array().into_iter().flatten() {
        let is_there = members.contains_key(name.as_str().unwrap());
        found.extend((!is_there).then(|| format!("{at}: no {name}")));
    }
    for (name, member) in members {
        let at = format!("{at}.{name}");
        match (schema["properties"].get(name), schema.get("additionalProperties")) {
            (Some(schema), _) => found.extend(misfits(document, schema, member, &at)),
            (None, Some(Value::Object(_))) => {
                found.extend(misfits(document, &schema["additionalProperties"], member, &at));
            }
            (None, _) if schema.get("properties").is_none() => {}
            (None, _) => found.push(format!("{at}: not in the document")),
        }
    }
    found
}

async fn fits(
    client: &Client,
    documents: &[Value],
    path: &str,
    method: &str,
    body: &Value,
) -> Reply {
    let reply = match method {
        "get" => client.get(path).await,
        _ => client.post(path, body.clone()).await,
    };
    let route = path.split('?').next().unwrap();
    for document in documents {
        let response =
            &document["paths"][route][method]["responses"][reply.status.to_string()]["content"];
        let contents = response.as_object();
        let contents =
            contents.unwrap_or_else(|| panic!("{method} {path}: {reply:#?} is not told"));
        let schema = &contents.values().next().unwrap()["schema"];
        assert_eq!(misfits(document, schema, &reply.body, route), [""; 0], "{reply:#?}");
    }
    reply
}

/// Each result and each problem is as both documents say, member by member.
#[tokio::test]
async fn replies_look_as_the_documents_say() {
    let service = start().await;
    let documents = documents();
    let post =
        async |path: &str, body: Value| fits(&service, &documents, path, "post", &body).await;
    let get = async |path: &str| fits(&service, &documents, path, "get", &Value::Null).await;
    let claim = json!({"key": "k", "owner_id": "a", "ttl_ms": 60_000, "metadata": {"a": "b"}});
    let version = post("/v1/leases/claim", claim.clone()).await.expect("claimed").version();
    post("/v1/leases/claim", claim.clone()).await.expect("held");
    let reference = json!({"key": "k", "owner_id": "a", "version": version});
    post("/v1/leases/renew", reference.clone()).await.expect("renewed");
    let items = json!([{"key": "k", "version": version}, {"key": "l", "version": 1}]);
    let many = post("/v1/leases/renew-many", json!({"owner_id": "a", "items": items})).await;
    assert_eq!(many.status, 200);
    post("/v1/leases/wait", json!({"key": "k", "wait_ms": 0})).await.expect("timed_out");
    post("/v1/leases/verify", json!({"key": "k", "version": version})).await.expect("current");
    post("/v1/leases/verify", json!({"key": "k", "version": 1})).await.expect("stale");
    get("/v1/leases/state?key=k").await;
    get("/v1/leases?limit=1").await;
    post("/v1/leases/force-release", json!({"key": "k", "reason": "r"})).await.expect("released");
    post("/v1/leases/force-release", json!({"key": "k", "reason": "r"})).await.expect("not_held");
    post("/v1/leases/renew", reference.clone()).await.expect_stale("revoked");
    post("/v1/leases/release", reference.clone()).await.expect_stale("revoked");
    let again = post("/v1/leases/claim", claim.clone()).await.expect("claimed");
    let reference = json!({"key": "k", "owner_id": "a", "version": again.version()});
    post("/v1/leases/release", reference).await.expect("released");
    post("/v1/leases/wait", json!({"key": "k", "wait_ms": 0})).await.expect("released");
    get("/v1/leases/state?key=k").await;
    for path in ["claim", "renew", "renew-many", "release", "wait", "verify", "force-release"] {
        post(&format!("/v1/leases/{path}"), json!({})).await.expect("invalid_request");
    }
    for path in ["/v1/leases?x=1", "/v1/leases/state"] {
        get(path).await.expect("invalid_request");
    }
    for path in ["/livez", "/readyz", "/v1/capabilities"] {
        assert_eq!(get(path).await.status, 200);
    }
    service.app.coordinator.drain();
    post("/v1/leases/claim", claim).await.expect("shutting_down");
    get("/readyz").await.expect("shutting_down");
    force(&service, "k", None).await;
}

/// The API browser is served whole by the service itself: it works without the internet.
#[tokio::test]
async fn the_api_browser_asks_no_other_host() {
    let service = start().await;
    for path in ["/docs", "/docs/"] {
        let page = service.get(path).await;
        assert_eq!(page.status, 200);
        assert!(header(&page, "content-type").starts_with("text/html"), "{page:?}");
        assert!(page.text.contains("swagger-ui"), "{page:?}");
    }
    let page = service.get("/docs/").await.text;
    let mut assets = Vec::new();
    for name in ["src=\"", "href=\""] {
        assets.extend(page.split(name).skip(1).map(|rest| rest.split('"').next().unwrap()));
    }
    assert!(assets.len() >= 3, "{assets:?}");
    for asset in assets {
        assert!(!asset.contains("//"), "{asset} is elsewhere");
        let url = reqwest::Url::parse(&format!("{}/docs/", service.base)).unwrap();
        let url = url.join(asset).unwrap();
        let reply = service.get(url.path()).await;
        assert_eq!(reply.status, 200, "{asset}");
    }
    assert!(!page.contains("http://") && !page.contains("https://"), "{page}");
    let initializer = service.get("/docs/swagger-initializer.js").await;
    assert_eq!(initializer.status, 200);
    assert!(initializer.text.contains("/openapi.json"), "{}", initializer.text);
    assert!(!initializer.text.contains("http://") && !initializer.text.contains("https://"));
}
