import java.io.*;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.*;

/** Apache's own client. What it is asked: record_lines.py */
public class Client {
    static final int PATIENCE_S = 60;

    static byte[] meant(String text) { return text.equals("-") ? null : Base64.getDecoder().decode(text); }

    static String shown(byte[] value) { return value == null ? "-" : Base64.getEncoder().encodeToString(value); }

    static String text(byte[] value) { return new String(value, StandardCharsets.UTF_8); }

    static ProducerRecord<byte[], byte[]> record(String topic, String line) {
        String[] fields = line.split("\t", -1);
        List<Header> headers = new ArrayList<>();
        for (int n = 6; n < fields.length; n++) {
            String[] parts = fields[n].split(":", -1);
            headers.add(new RecordHeader(text(meant(parts[0])), meant(parts[1])));
        }
        Long timestamp = fields[3].equals("-") ? null : Long.valueOf(fields[3]);
        int partition = Integer.parseInt(fields[1]);
        return new ProducerRecord<>(topic, partition, timestamp, meant(fields[4]), meant(fields[5]), headers);
    }

    static String line(ConsumerRecord<byte[], byte[]> found) {
        StringJoiner line = new StringJoiner("\t", "", "\n");
        line.add(found.topic()).add("" + found.partition()).add("" + found.offset()).add("" + found.timestamp());
        line.add(shown(found.key())).add(shown(found.value()));
        for (Header each : found.headers())
            line.add(shown(each.key().getBytes(StandardCharsets.UTF_8)) + ":" + shown(each.value()));
        return line.toString();
    }

    static void produce(String bootstrap, Map<String, String> topics) throws Exception {
        List<String> lines = new ArrayList<>();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = input.readLine()) != null; ) lines.add(line);
        for (Map.Entry<String, String> topic : topics.entrySet()) {
            Map<String, Object> settings = Map.of("bootstrap.servers", bootstrap, "compression.type", topic.getValue(),
                "max.request.size", 2_000_000, "linger.ms", 20);
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
                for (String line : lines) sent.add(producer.send(record(topic.getKey(), line)));
                producer.flush();
            }
            for (Future<RecordMetadata> each : sent) each.get();
        }
    }

    static void consume(String bootstrap, Map<String, String> topics) throws Exception {
        Map<String, Object> settings = Map.of("bootstrap.servers", bootstrap, "auto.offset.reset", "earliest");
        List<TopicPartition> places = new ArrayList<>();
        int left = 0;
        for (Map.Entry<String, String> topic : topics.entrySet()) {
            left += Integer.parseInt(topic.getValue());
            for (int number = 0; number < 2; number++) places.add(new TopicPartition(topic.getKey(), number));
        }
        long until = System.nanoTime() + PATIENCE_S * 1_000_000_000L;
        PrintStream output = new PrintStream(new BufferedOutputStream(System.out, 1 << 20));
        try (var consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.assign(places);
            while (left > 0) {
                if (System.nanoTime() > until) throw new IllegalStateException(left + " are not read");
                for (ConsumerRecord<byte[], byte[]> found : consumer.poll(Duration.ofSeconds(1))) {
                    output.print(line(found));
                    left--;
                }
            }
        }
        output.flush();
    }

    public static void main(String[] args) throws Exception {
        Map<String, String> topics = new LinkedHashMap<>();
        for (String pair : Arrays.asList(args).subList(2, args.length)) {
            String[] parts = pair.split("=");
            topics.put(parts[0], parts[1]);
        }
        if (args[0].equals("produce")) produce(args[1], topics);
        else consume(args[1], topics);
    }
}
