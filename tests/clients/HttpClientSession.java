// Uses the JDK's HttpClient as its users do: with its defaults, which offer HTTP/2 by an upgrade on every request.
// Prints a line for each step: its name, the HTTP version and status, and the body or the number of its lines.
// Argument: the server's URL.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.util.stream.Stream;

public class HttpClientSession {
  static final String PROMPT = "{\"prompt\":\"import os\\n\",\"max_tokens\":8,\"temperature\":0";

  static HttpRequest.Builder request(String url) {
    return HttpRequest.newBuilder(URI.create(url)).timeout(Duration.ofSeconds(30));
  }

  static HttpRequest.Builder post(String url, String body) {
    return request(url + "/v1/completions")
        .header("Content-Type", "application/json")
        .POST(BodyPublishers.ofString(body));
  }

  static void tell(String step, HttpResponse<?> response, Object content) {
    System.out.println(step + "\t" + response.version() + "\t" + response.statusCode() + "\t" + content);
  }

  static void send(HttpClient client, String step, HttpRequest request) throws Exception {
    HttpResponse<String> response = client.send(request, BodyHandlers.ofString());
    tell(step, response, response.body());
  }

  public static void main(String[] arguments) throws Exception {
    String url = arguments[0];
    HttpClient client = HttpClient.newHttpClient();
    send(client, "first", post(url, PROMPT + "}").build());
    send(client, "second", post(url, PROMPT + "}").build());
    send(client, "expect-continue", post(url, PROMPT + "}").expectContinue(true).build());
    send(client, "unknown-length", request(url + "/v1/completions")
        .POST(BodyPublishers.fromPublisher(BodyPublishers.ofString(PROMPT + "}"))).build());
    HttpResponse<Stream<String>> stream =
        client.send(post(url, PROMPT + ",\"stream\":true}").build(), BodyHandlers.ofLines());
    try (Stream<String> lines = stream.body()) {
      lines.filter(line -> !line.isEmpty()).forEach(line -> tell("stream", stream, line));
    }
    send(client, "refused", post(url, "{\"prompt\":\"a\",\"temperature\":3}").build());
    send(client, "health", request(url + "/health").GET().build());
    send(client, "head", request(url + "/health").method("HEAD", BodyPublishers.noBody()).build());
    HttpClient plain = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
    send(plain, "http1.1", post(url, PROMPT + "}").build());
  }
}
