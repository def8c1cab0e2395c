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

    static KafkaProducer<byte[], byte[]> producer(String bootstrap, Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>(more);
        settings.putAll(Map.of("bootstrap.servers", bootstrap, "max.request.size", 2_000_000, "linger.ms", 20));
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

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
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            try (var producer = producer(bootstrap, Map.of("compression.type", topic.getValue()))) {
                for (String line : lines) sent.add(producer.send(record(topic.getKey(), line)));
                producer.flush();
            }
            for (Future<RecordMetadata> each : sent) each.get();
        }
    }

    static KafkaConsumer<byte[], byte[]> consumer(String bootstrap, Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>(more);
        settings.putAll(Map.of("bootstrap.servers", bootstrap, "enable.auto.commit", false,
            "auto.offset.reset", "earliest", "isolation.level", "read_committed"));
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static void consume(String bootstrap, Map<String, String> topics) throws Exception {
        List<TopicPartition> places = new ArrayList<>();
        int left = 0;
        for (Map.Entry<String, String> topic : topics.entrySet()) {
            left += Integer.parseInt(topic.getValue());
            for (int number = 0; number < 2; number++) places.add(new TopicPartition(topic.getKey(), number));
        }
        long until = System.nanoTime() + PATIENCE_S * 1_000_000_000L;
        PrintStream output = new PrintStream(new BufferedOutputStream(System.out, 1 << 20));
        try (var consumer = consumer(bootstrap, Map.of())) {
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

    /** The steps of record_lines.transact. */
    static class Steps {
        final String bootstrap;
        final Map<TopicPartition, OffsetAndMetadata> read = new HashMap<>();
        KafkaProducer<byte[], byte[]> producer;
        KafkaConsumer<byte[], byte[]> consumer;

        Steps(String bootstrap) { this.bootstrap = bootstrap; }

        /** Return the rows that it prints. */
        String step(String step, String rest) {
            String[] words = rest.split("\t", -1);
            StringBuilder rows = new StringBuilder();
            switch (step) {
                case "init":
                    producer = producer(bootstrap, Map.of("transactional.id", rest, "compression.type", "lz4"));
                    producer.initTransactions();
                    break;
                case "begin": producer.beginTransaction(); break;
                case "send": producer.send(record(words[0], rest)); break;
                case "flush": producer.flush(); break;
                case "commit": producer.commitTransaction(); break;
                case "abort": producer.abortTransaction(); break;
                case "join":
                    consumer = consumer(bootstrap, Map.of("group.id", words[0], "max.poll.records", 10,
                        "heartbeat.interval.ms", 300));
                    consumer.subscribe(List.of(words[1]));
                    break;
                case "poll":
                    read.clear();
                    for (ConsumerRecord<byte[], byte[]> found : consumer.poll(Duration.ofMillis(500))) {
                        rows.append(line(found));
                        TopicPartition place = new TopicPartition(found.topic(), found.partition());
                        read.put(place, new OffsetAndMetadata(found.offset() + 1));
                    }
                    break;
                case "offsets": producer.sendOffsetsToTransaction(read, consumer.groupMetadata()); break;
                case "leave": consumer.close(); break;
                default: throw new IllegalArgumentException(step);
            }
            return rows.toString();
        }
    }

    static void transact(String bootstrap) throws Exception {
        Steps steps = new Steps(bootstrap);
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = input.readLine()) != null; ) {
            String[] parts = line.split("\t", 2);
            try {
                System.out.print(steps.step(parts[0], parts.length > 1 ? parts[1] : "") + "done\n");
            } catch (Exception err) {
                System.out.print(err.toString().replace('\n', ' ').replace('\t', ' ') + "\n");
            }
            System.out.flush();
        }
    }

    public static void main(String[] args) throws Exception {
        Map<String, String> topics = new LinkedHashMap<>();
        for (String pair : Arrays.asList(args).subList(2, args.length)) {
            String[] parts = pair.split("=");
            topics.put(parts[0], parts[1]);
        }
        if (args[0].equals("produce")) produce(args[1], topics);
        else if (args[0].equals("consume")) consume(args[1], topics);
        else transact(args[1]);
    }
}
